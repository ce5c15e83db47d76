"""What packages that build on this one may use, beside ``autograd_hacks``, its forms, formulas and errors.

The library's own rooms are such packages: attribution, check, curvature, private, distributed and integrations.

- Records: ``recorder_of`` a hooked model has the ``record`` of passes; ``Hooked`` is what `add_hooks` returns; ``announced``
- Rows: ``grads_of`` a record; ``ask_independent``; ``run_pass`` from an output (``check_output``) to ``leaves_of`` its graph
- ``.grad``: ``check_may_set``, ``drop_grads``, and ``set_grads`` or ``mark_set``
- Rows that are read twice: ``write_where_it_saves`` within ``CLIPPING_BUDGET``, and ``give_back``
- Processes: ``spread_of`` a batch is a ``Spread``; ``Where`` names processes; ``has_processes``; ``check_alone``; a room for
  several registers itself with ``ABOVE``; ``Recorder``; ``gathering`` and ``refuse_parts`` of shards
- Factors of products: ``Positions``, ``OneHot``, ``Windows``; numbers: ``row_norms``, ``clip_weights``,
  ``slices_of``, ``accumulation_dtype``
- Arguments: checks that raise in the library's words, and words for messages
"""

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.arrivals import ANNOUNCED, announced
from autograd_hacks.capture.hooks import Hooked, recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Announcement, assumed
from autograd_hacks.capture.uncompiled import Uncompiled
from autograd_hacks.capture.wrappers import check_module, gathering, has_processes, refuse_parts
from autograd_hacks.forms.numerics import accumulation_dtype, clip_weights, row_norms, slices_of
from autograd_hacks.forms.positions import OneHot, Positions, Windows
from autograd_hacks.probe.batch import BatchDim
from autograd_hacks.reading.guards import LOSS_TYPES, check_batch_size, is_unscaled
from autograd_hacks.reading.processes import Spread, Where, spread_of
from autograd_hacks.verbs.arguments import check_kind, check_loader, check_state, differing, kind_of, some
from autograd_hacks.verbs.clipping import CLIPPING_BUDGET, give_back, write_where_it_saves
from autograd_hacks.verbs.jacobian import check_output, leaves_of, run_pass
from autograd_hacks.verbs.per_sample import check_alone, check_may_set, drop_grads, grads_of, mark_set, set_grads
from autograd_hacks.verbs.statistics import NoiseScale
from autograd_hacks.verbs.verify import ask_independent

__all__ = [
    "ABOVE", "accumulation_dtype", "ANNOUNCED", "announced", "Announcement", "ask_independent", "assumed", "BatchDim",
    "check_alone", "check_batch_size", "check_kind", "check_loader", "check_may_set", "check_module", "check_output",
    "check_state", "clip_weights", "CLIPPING_BUDGET", "differing", "drop_grads", "gathering", "give_back", "grads_of",
    "has_processes", "Hooked", "is_unscaled", "kind_of", "leaves_of", "LOSS_TYPES", "mark_set", "NoiseScale", "OneHot",
    "Positions", "Recorder", "recorder_of", "refuse_parts", "row_norms", "run_pass", "set_grads", "slices_of", "some",
    "Spread", "spread_of", "Uncompiled", "Where", "Windows", "write_where_it_saves",
]  # fmt: skip
