"""Suggestions for names that the library doesn't have."""

from collections.abc import Collection
from difflib import get_close_matches

MEANT = {
    "add_hooks(model)": ("hook", "hooks", "attach", "extend", "watch", "register_hooks", "GradSampleModule"),
    "remove_hooks(model)": ("detach", "unhook", "remove", "unwatch"),
    "compute_grad1(model), which sets param.grad1": (
        *("grad1", "grad_sample", "grad_samples", "per_sample_gradient", "per_sample_gradients", "per_example_gradients"),
        *("grad_batch", "individual_gradients", "vmap", "call_for_per_sample_grads"),
    ),
    "per_sample_grads(model)": ("grads", "rows", "gradients", "per_sample_grad", "per_example_grads"),
    "per_sample_grads(model).norms()": ("norm", "norms", "grad_norms", "per_sample_norms", "gradient_norms"),
    "per_sample_grads(model).dot(v)": ("dot", "jvp", "directional_derivative"),
    "per_sample_grads(model).gram()": ("gram", "inner_products", "similarity"),
    "per_sample_grads(model).weighted_sum(w)": ("weighted_sum", "vjp", "reweight"),
    "per_sample_grads(model).variance()": ("var", "variance"),
    "per_sample_grads(model).noise_scale()": ("noise_scale", "gns", "gradient_noise_scale"),
    "per_sample_grads(model).project(dim)": ("project", "projection", "trak"),
    "per_sample_jacobian(model, output)": ("jacobian", "jacrev", "ntk", "tangent_kernel"),
    "clip_grad1_norm_(model, max_norm)": (
        *("clip", "clip_", "clip_grad_norm", "clip_grad_norm_", "clip_gradients", "clip_per_sample", "ghost_clipping"),
    ),
    "clip_and_noise_(model, max_norm, noise_multiplier, expected_batch_size)": ("noise", "privatize", "dp_step", "dpsgd"),
    "integrations.opacus.PrivacyEngine": ("PrivacyEngine", "make_private"),
    "compute_hess(model, kind='full')": ("hess", "hessian", "ggn", "gauss_newton"),
    "compute_hess(model, kind='diag')": ("hess_diag", "diag_ggn", "diagonal"),
    "compute_hess(model, kind='kfac')": ("kfac", "KFAC", "kron"),
    "per_sample_grads(model).fisher_matvec(v)": ("fisher", "fisher_matvec"),
    "accumulate(model)": ("accumulation", "micro_batches", "no_sync"),
    "check_rows(model, batch, loss, rows)": ("check", "check_grads", "gradcheck"),
}
"""{call: names that people try for it, from other libraries, tensors and `PerSampleGrads`}"""


def hint(name: str, public: Collection[str]) -> str:
    """The end of a message about an unknown name: a call or a close name to use instead, or nothing."""
    if name.startswith("_"):
        return ""
    meant = next((call for call, names in MEANT.items() if name in names), None)
    close = get_close_matches(name, public, 1)
    if meant is None and not close:
        close = get_close_matches(name, [other for names in MEANT.values() for other in names], 1, 0.8)
        meant = next((call for call, names in MEANT.items() if close and close[0] in names), None)
        close = []
    found = meant or next(iter(close), None)
    if found is not None and found.startswith("integrations."):  # whose modules are imported one by one
        module, _, name = found.rpartition(".")
        return f". Did you mean this: from autograd_hacks.{module} import {name}?"
    return "" if found is None else f". Did you mean autograd_hacks.{found}?"
