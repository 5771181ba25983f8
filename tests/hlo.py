"""What XLA made of a program, read from its text."""

import re


def pool_copies(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Copies of the pool's or of a layer's shape in HLO text."""
    whole = ",".join(map(str, shape))
    layer = ",".join(map(str, shape[1:]))
    pattern = (
        rf"= \(?\w+\[(?:{whole}|(?:1,)?{layer})\]\S* (?:copy|copy-start|dynamic-slice|slice)\("
    )
    return re.findall(pattern, hlo)
