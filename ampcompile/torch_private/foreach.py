"""torch's operations on lists of tensors, and those of its gradient scaler; all of them write in place."""

from typing import Any

import torch

add_: Any = torch._foreach_add_
copy_: Any = torch._foreach_copy_
multiply_: Any = torch._foreach_mul_
check_and_unscale_: Any = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_: Any = torch._amp_update_scale_
