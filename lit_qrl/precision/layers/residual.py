"""Decoder layers whose residual sums, and the sums of their gradients, are made by the norms that read them.

    h' = h + attention(norm(h));  h'' = h' + mlp(norm(h'))

Plain operations go over the hidden states four times more: for h', and for the sums of the two gradients that h and h'
have each.
"""

from typing import Any

from torch import Tensor, nn

from lit_qrl.network.modes import is_repeated
from lit_qrl.network.names import become
from lit_qrl.network.structure import PLAIN_LAYERS
from lit_qrl.precision.layers.flat_attention import turn_while_laid_out
from lit_qrl.precision.layers.joined_linear import join_linears
from lit_qrl.precision.layers.one_pass import OnePassGatedMLP, OnePassRMSNorm


class ResidualLayer(nn.Module):
    """Over a class of decoder layers of the library's own: the same parts in the same order."""

    hands_on = False
    """Whether the output is handed on in its two parts, which the next layer's first norm adds."""

    def forward(self, hidden_states: Tensor | tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output "b n h"; the arguments are the library's, or the layer's before."""
        layer: Any = self
        norms = layer.input_layernorm, layer.post_attention_layernorm
        parts = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        # others may have put kernels of theirs in their place
        if args or any(type(norm) is not OnePassRMSNorm for norm in norms):
            return super().forward(sum(parts[1:], parts[0]), *args, **kwargs)  # pyright: ignore
        y, h = norms[0](*parts, both=True)
        attended, _ = layer.self_attn(hidden_states=y, **{"attention_mask": None, **kwargs})
        y, h = norms[1](attended, h, both=True)
        out = layer.mlp(y, **({"unread": is_repeated()} if type(layer.mlp) is OnePassGatedMLP else {}))
        return (out, h) if self.hands_on else h + out


class HandingLayer(ResidualLayer):
    """Of a sampler, whose layers nothing looks at one by one."""

    hands_on = True


def join_residuals(network: nn.Module, across: bool = False) -> None:
    """Let the norms of decoder layers that are known make their residual sums, in place.

    Args:
        network: a model whose norms `take_one_pass` has replaced; whatever is not known stays as it is.
        across: those of two layers too: what one of them hands to the next is then a pair, but of the last.
    """
    layers = [layer for layer in network.modules() if type(layer).__name__ in PLAIN_LAYERS]
    for layer in layers:
        become(layer, HandingLayer if across and layer is not layers[-1] else ResidualLayer)


def join_layers(network: nn.Module) -> None:
    """Let what decoder layers compute one after the other take fewer kernels, in place.

    Args:
        network: a causal language model whose norms `take_one_pass` has replaced.
    """
    join_linears(network)
    join_residuals(network)
    turn_while_laid_out(network)
