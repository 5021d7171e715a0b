"""What every section of a recipe has in common, and the optimizer's, which two of them share."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hybridflow.recipe.ranges import Betas, NotNegative, Positive


class Section(BaseModel):
    """A mapping of the recipe: unknown keys are errors, values keep their YAML type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class OptimizerSection(Section):
    """AdamW and its learning rate over the optimizer steps of a stage."""

    lr: Positive = Field(examples=[1e-6], description="peak learning rate")
    betas: Betas = Field(default=[0.9, 0.999], description="decay of the first and second moments")
    eps: Positive = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: NotNegative = Field(default=0.0, description="decoupled weight decay")
    clip_grad: NotNegative = Field(
        default=1.0, description="largest global gradient norm; 0: no clipping"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course of the learning rate after the warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    min_lr: NotNegative = Field(
        default=0.0, description="learning rate at the end of a falling schedule"
    )
