"""What a server may be told."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of `make_app`."""

    served_model_name: str = "model"
    """What clients call the model."""
    api_key: str | None = None
    """What clients must send as `Authorization: Bearer ...`; None: nothing."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server (CORS); "*" is any."""
    max_body_bytes: int = 8 * 2**20
    max_prompts: int = 128
    """Most prompts of one completion."""
    stalled_after: float = 600.0
    """Seconds without the end of a dispatch after which /health says 503."""

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ValueError("served_model_name ('') must not be empty")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise ValueError("api_key must be ASCII text, and not empty")
        for name in ("max_body_bytes", "max_prompts"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} ({value!r}) must be an integer of at least 1")
        if not self.stalled_after > 0:
            raise ValueError(f"stalled_after ({self.stalled_after!r}) must be above 0")
