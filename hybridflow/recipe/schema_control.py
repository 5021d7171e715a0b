"""The recipe's control section: a port on which a running run answers."""

from ipaddress import ip_address

from pydantic import Field

from hybridflow.recipe.ranges import Seconds, Text
from hybridflow.recipe.section import Section


class ControlSection(Section):
    """An HTTP port of the driver: live values, metrics, health."""

    host: Text = Field(
        default="127.0.0.1", description="address to listen on; beyond this machine with a token"
    )
    port: int = Field(default=0, ge=0, le=65535, description="0: any free one")
    token_env: Text | None = Field(
        default=None,
        description="environment variable of the driver that holds a bearer token, which every "
        "request must then carry",
    )
    stall_seconds: Seconds = Field(
        default=3600.0,
        description="time since the last step after which /health says that the run stands still",
    )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the port."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
