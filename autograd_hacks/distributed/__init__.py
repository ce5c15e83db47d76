"""A batch spread over processes: which processes have samples, what all must do together, and sums over samples."""

from autograd_hacks.distributed import agreement as agreement  # which registers itself with capture
from autograd_hacks.distributed import spread as spread  # which registers itself with reading
