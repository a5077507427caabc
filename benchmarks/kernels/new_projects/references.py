"""The same as the kernels of this folder, in PyTorch; ``given`` has the arguments by name."""

from __future__ import annotations

from typing import Any

Given = dict[str, Any]


def _softmax(score: Any, v: Any) -> Any:
    return score.softmax(-1) @ v


def int8_attention(torch: Any, g: Given) -> Given:
    q, k, v = (g[f"{x}_ptr"].float() for x in "qkv")
    qs = g["qs_ptr"].repeat_interleave(g["BLOCK_M"], 1)
    ks = g["ks_ptr"].repeat_interleave(g["BLOCK_N"], 1)
    score = q @ k.transpose(1, 2) * qs[:, :, None] * ks[:, None, :]
    return {"o_ptr": _softmax(score * 0.6931471805599453, v)}


def pair_bias_attention(torch: Any, g: Given) -> Given:
    q, k, v = (g[f"{x}_ptr"].float() for x in "qkv")
    score = q @ k.transpose(1, 2) * 0.25 + g["bias_ptr"].float()
    return {"o_ptr": _softmax(score, v) * g["gate_ptr"].float().sigmoid()}


def silu_attention(torch: Any, g: Given) -> Given:
    q, k, v = (g[f"{x}_ptr"].float() for x in "qkv")
    n = g["N"]
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    score = q @ k.transpose(1, 2) * 0.125 + g["bias_ptr"][distance.clamp(min=0)]
    score = torch.nn.functional.silu(score) / n
    return {"o_ptr": torch.where(distance >= 0, score, 0.0) @ v}


def selected_attention(torch: Any, g: Given) -> Given:
    q, k, v = (g[f"{x}_ptr"].float() for x in "qkv")
    rows = g["block_ptr"].long()[:, :, None] * g["BLOCK"] + torch.arange(g["BLOCK"])
    rows = rows.flatten(1)
    score = q @ k[rows].transpose(1, 2) * 0.1275 * 0.6931471805599453
    return {"o_ptr": _softmax(score, v[rows])}


def token_attention(torch: Any, g: Given) -> Given:
    q, k, v = (g[f"{x}_ptr"].float() for x in "qkv")
    slots = g["slot_ptr"].long().unflatten(1, (g["SPLITS"], -1))
    score = (k[slots] * q[:, None, None, :]).sum(-1) * 0.0884
    o = (score.softmax(-1)[..., None] * v[slots]).sum(2)
    return {"o_ptr": o, "lse_ptr": score.logsumexp(-1)}


def retention(torch: Any, g: Given) -> Given:
    q, k, v = (g[f"{x}_ptr"].float() for x in "qkv")
    t = torch.arange(g["N"])
    distance = (t[:, None] - t[None, :]).float()
    decay = torch.exp2(distance * g["decay_ptr"][:, None, None])
    return {"o_ptr": (q @ k.transpose(1, 2) * torch.where(distance >= 0, decay, 0.0)) @ v}


def lightning_attention(torch: Any, g: Given) -> Given:
    size = (g["N"] // g["BLOCK"], g["BLOCK"])
    q, k, v = (g[f"{x}_ptr"].float().unflatten(1, size) for x in "qkv")
    t = torch.arange(g["BLOCK"])
    distance = (t[:, None] - t[None, :]).float()
    slope = g["slope_ptr"][:, None, None, None]
    decay = torch.where(distance >= 0, torch.exp2(distance * slope), 0.0)
    inner = (q @ k.transpose(2, 3) * decay) @ v
    fade = torch.exp2(slope * (t + 1.0)[:, None])
    return {"o_ptr": (inner + q @ g["state_ptr"].float() * fade).flatten(1, 2)}


def scattered_experts(torch: Any, g: Given) -> Given:
    x = g["x_ptr"].float()[g["index_ptr"].long() // g["FAN_OUT"]]
    tiles = x.unflatten(0, (-1, g["BLOCK_M"]))
    return {"y_ptr": (tiles @ g["w_ptr"].float()[g["expert_ptr"].long()]).flatten(0, 1)}


def _unpacked(words: Any, count: int, bits: int, torch: Any) -> Any:
    shift = torch.arange(count) * bits
    return (words[..., None] >> shift) & ((1 << bits) - 1)


def zero_point_gemm(torch: Any, g: Given) -> Given:
    q = _unpacked(g["q_ptr"], 8, 4, torch).transpose(1, 2).flatten(0, 1)
    zeros = _unpacked(g["zero_ptr"], 8, 4, torch).flatten(1).repeat_interleave(g["GROUP"], 0)
    scale = g["scale_ptr"].float().repeat_interleave(g["GROUP"], 0)
    return {"c_ptr": g["a_ptr"].float() @ ((q - zeros) * scale)}


def linear_lse(torch: Any, g: Given) -> Given:
    logits = 30.0 * torch.tanh(g["e_ptr"].float() @ g["c_ptr"].float().T / 30.0)
    return {"lse_ptr": logits.unflatten(1, (-1, g["BLOCK_N"])).logsumexp(2)}


def block_sparse_sdd(torch: Any, g: Given) -> Given:
    a, b = (g[f"{x}_ptr"].float().unflatten(0, (-1, g["BLOCK"])) for x in "ab")
    return {"c_ptr": a[g["row_ptr"].long()] @ b[g["column_ptr"].long()].transpose(1, 2)}


def linear_gelu(torch: Any, g: Given) -> Given:
    pre = g["x_ptr"].float() @ g["w_ptr"].float().T + g["bias_ptr"].float()
    return {"pre_ptr": pre, "y_ptr": torch.nn.functional.gelu(pre)}


def adapter_shrink(torch: Any, g: Given) -> Given:
    x = g["x_ptr"].float().unflatten(0, (-1, g["BLOCK_M"])).unflatten(2, (g["SPLITS"], -1))
    a = g["a_ptr"].float()[g["adapter_ptr"].long()].unflatten(2, (g["SPLITS"], -1))
    return {"y_ptr": torch.einsum("bmsk,brsk->sbmr", x, a).flatten(1, 2)}


def packed_gemv(torch: Any, g: Given) -> Given:
    value = _unpacked(g["q_ptr"], 4, 8, torch).transpose(1, 2).flatten(0, 1) - 128.0
    parts = (g["x_ptr"].float()[:, None] * value).unflatten(0, (g["SPLITS"], -1)).sum(1)
    return {"y_ptr": parts * g["scale_ptr"]}


def ternary_gemm(torch: Any, g: Given) -> Given:
    w = _unpacked(g["w_ptr"], 4, 2, torch).transpose(1, 2).flatten(1) - 1
    c = g["a_ptr"].float() @ w.float().T
    return {"c_ptr": c * g["a_scale_ptr"][:, None] * g["w_scale_ptr"]}


def codebook_gemv(torch: Any, g: Given) -> Given:
    weight = g["book_ptr"].float()[g["code_ptr"].long()].flatten(1)
    return {"y_ptr": weight @ g["x_ptr"].float() * g["scale_ptr"]}


def geglu_backward(torch: Any, g: Given) -> Given:
    dw, gate = g["dw_ptr"].float(), g["g_ptr"].float()
    e = g["e_ptr"].float().requires_grad_()
    f = torch.nn.functional.gelu(e, approximate="tanh")
    (slope,) = torch.autograd.grad(f.sum(), e)
    f = f.detach()
    return {"h_ptr": f * gate, "dg_ptr": dw * f, "de_ptr": dw * gate * slope}


def group_norm(torch: Any, g: Given) -> Given:
    x, weight, bias = (g[f"{x}_ptr"].float() for x in ("x", "weight", "bias"))
    grouped = x.unflatten(1, (g["GROUPS"], -1)).flatten(2)
    rstd = (grouped.var(2, unbiased=False) + 1e-5).rsqrt()
    y = torch.nn.functional.group_norm(x, g["GROUPS"], weight, bias, 1e-5)
    return {"y_ptr": y, "mean_ptr": grouped.mean(2).flatten(), "rstd_ptr": rstd.flatten()}


def causal_conv(torch: Any, g: Given) -> Given:
    x, weight = g["x_ptr"].float().transpose(1, 2), g["weight_ptr"].float()[:, None, :]
    padded = torch.nn.functional.pad(x, (3, 0))
    y = torch.nn.functional.conv1d(padded, weight, g["bias_ptr"].float(), groups=x.shape[1])
    return {"y_ptr": torch.nn.functional.silu(y).transpose(1, 2)}


def wkv(torch: Any, g: Given) -> Given:
    w, u = -g["w_ptr"].exp(), g["u_ptr"]
    k, v = g["k_ptr"].float(), g["v_ptr"].float()
    a = b = torch.zeros_like(k[:, 0])
    rows = []
    for step in range(k.shape[1]):
        now = (u + k[:, step]).exp()
        rows.append((a + now * v[:, step]) / (b + now))
        a = a * w.exp() + k[:, step].exp() * v[:, step]
        b = b * w.exp() + k[:, step].exp()
    return {"y_ptr": torch.stack(rows, 1)}


def lion_update(torch: Any, g: Given) -> Given:
    p, grad, m = (g[f"{x}_ptr"].float() for x in ("p", "g", "m"))
    p = p * (1.0 - 1e-6) - 1e-4 * (0.9 * m + 0.1 * grad).sign()
    return {"pout_ptr": p, "mout_ptr": 0.99 * m + 0.01 * grad}


def volume_rendering(torch: Any, g: Given) -> Given:
    optical = g["density_ptr"] * g["delta_ptr"]
    weight = torch.exp(optical - optical.cumsum(1)) * (1.0 - torch.exp(-optical))
    image = (weight[:, :, None] * g["colour_ptr"].float()).sum(1)
    return {"image_ptr": image, "weight_ptr": weight}


def merge_attention(torch: Any, g: Given) -> Given:
    lse = g["lse_ptr"]
    y = (lse.softmax(0)[:, :, None] * g["o_ptr"].float()).sum(0)
    return {"y_ptr": y, "total_ptr": lse.logsumexp(0)}


def layernorm_backward(torch: Any, g: Given) -> Given:
    dy, x, weight = (g[f"{x}_ptr"].float() for x in ("dy", "x", "weight"))
    rstd = g["rstd_ptr"][:, None]
    normal = (x - g["mean_ptr"][:, None]) * rstd
    grad = dy * weight
    dx = grad - normal * (normal * grad).mean(1, keepdim=True) - grad.mean(1, keepdim=True)
    blocks = (-1, g["ROWS"])
    return {
        "dx_ptr": dx * rstd,
        "dweight_ptr": (dy * normal).unflatten(0, blocks).sum(1),
        "dbias_ptr": dy.unflatten(0, blocks).sum(1),
    }


def mlstm_state(torch: Any, g: Given) -> Given:
    k, v = g["k_ptr"].float(), g["v_ptr"].float()
    forget = torch.nn.functional.logsigmoid(g["f_ptr"])
    state, norm = torch.zeros(*k.shape[::2], v.shape[2]), torch.zeros(*k.shape[::2])
    peak = torch.zeros(len(k))
    rows: list[tuple[Any, Any, Any]] = []
    for start in range(0, k.shape[1], g["BLOCK_T"]):
        rows.append((state, norm, peak))
        part = slice(start, start + g["BLOCK_T"])
        total = forget[:, part].sum(1)
        gate = g["i_ptr"][:, part] + total[:, None] - forget[:, part].cumsum(1)
        new = torch.maximum(total + peak, gate.amax(1))
        keys = k[:, part] * torch.exp(gate - new[:, None])[:, :, None]
        old = torch.exp(total + peak - new)
        state = state * old[:, None, None] + keys.transpose(1, 2) @ v[:, part]
        norm = norm * old[:, None] + keys.sum(1)
        peak = new
    found = [torch.stack(values, 1) for values in zip(*rows, strict=True)]
    return dict(zip(("c_ptr", "n_ptr", "m_ptr"), found, strict=True))
