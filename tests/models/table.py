"""Writes the table of docs/models.md from the registry and the checkpoints of the tests.

python -m tests.models.table
"""

from pathlib import Path

from paged_jax.models.registry import ARCHITECTURES, read_spec
from paged_jax.models.spec import AttentionSpec, DecoderSpec, MoESpec
from tests.models.gguf_files import FAMILIES
from tests.models.tiny import NAMES, config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
START, END = "<!-- table: python -m tests.models.table -->\n", "<!-- end of table -->"


def table() -> str:
    """A row per architecture."""
    lines = [
        "| architecture | beside Llama's parts | verified with | GGUF |",
        "| --- | --- | --- | --- |",
    ]
    for architecture in sorted(ARCHITECTURES):
        names = [name for name in NAMES if config(name)["architectures"] == [architecture]]
        parts = dict.fromkeys(part for name in names for part in _parts(read_spec(config(name))))
        family = FAMILIES.get(architecture)
        lines.append(
            f"| `{architecture}` | {', '.join(parts) or '-'} | {', '.join(names)} | "
            f"{f'`{family}`' if family else '-'} |"
        )
    return "\n".join(lines) + "\n"


def write() -> None:
    """Puts the table into the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    _, after = rest.split(END)
    PAGE.write_text(before + START + table() + END + after, encoding="utf-8")


def _parts(spec: DecoderSpec) -> list[str]:
    """What a spec has that Llama's has not."""
    attentions = [layer.attention for layer in spec.layers]
    plain = [attention for attention in attentions if isinstance(attention, AttentionSpec)]
    ropes = [attention.rope for attention in attentions]
    mlps = [layer.mlp for layer in spec.layers]
    first = spec.layers[0]
    found = {
        "latent attention": len(plain) < len(attentions),
        "sliding window": any(attention.sliding_window for attention in plain)
        and all(attention.sliding_window for attention in plain),
        "sliding window in some layers": len({a.sliding_window for a in plain}) > 1,
        "soft cap": any(attention.soft_cap for attention in plain),
        "sinks": any(attention.has_sinks for attention in plain),
        "norm of each query and key head": any(a.qk_norm == "head" for a in plain),
        "norm over all query and key heads": any(a.qk_norm == "all" for a in plain),
        "biases of q, k, v": any(a.has_qkv_bias and not a.has_out_bias for a in plain),
        "biases of q, k, v and output": any(a.has_qkv_bias and a.has_out_bias for a in plain),
        "scale of its own": any(attention.sm_scale is not None for attention in plain),
        "learned positions": spec.has_learned_positions,
        "layers without rope": None in ropes and not spec.has_learned_positions,
        "two ropes": len({rope for rope in ropes if rope}) > 1,
        **{f"rope {rope.kind}": rope.kind != "default" for rope in ropes if rope},
        "LayerNorm": spec.norm.kind == "layer",
        "norms after attention and MLP": first.has_post_norms,
        "none before": not first.has_pre_norms,
        "plain MLP": any(not mlp.is_gated for mlp in mlps if not isinstance(mlp, MoESpec)),
        "GELU": any(mlp.activation.startswith("gelu") for mlp in mlps),
        "experts": any(isinstance(mlp, MoESpec) for mlp in mlps),
        "shared expert": any(isinstance(mlp, MoESpec) and mlp.shared_size for mlp in mlps),
        "scaled embedding": spec.embed_scale != 1.0,
        "scaled residuals": spec.residual_scale != 1.0,
        "scaled logits": spec.logit_scale != 1.0,
        "capped logits": spec.logit_cap is not None,
    }
    return [part for part, is_there in found.items() if is_there]


if __name__ == "__main__":
    write()
