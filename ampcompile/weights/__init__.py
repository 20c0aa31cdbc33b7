"""Low-precision copies of weights: cast once per update, shared by all graphs, reused until a write is detected."""

from .binding import Binding as Binding
from .binding import ShardBinding as ShardBinding
from .captures import CapturedCopies as CapturedCopies
from .release import release_masters as release_masters
from .reports import refuse_late_reads as refuse_late_reads
from .spec import CopySpec as CopySpec
from .spec import Form as Form
from .spec import hoistable_parameters as hoistable_parameters
from .step import WritableCopies as WritableCopies
from .step import writable_copies as writable_copies
from .store import free_copies as free_copies
from .store import invalidate as invalidate
from .store import mark_unproven as mark_unproven
from .store import weight_stats as weight_stats
