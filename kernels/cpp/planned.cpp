// An optimizer's tensors as Python holds them: are they those that a step was planned for, and where are the gradients?
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <exception>
#include <list>
#include <memory>
#include <set>
#include <vector>

#include "objects.h"

namespace {
// Where a tensor's numbers begin; null for sparse ones, which have no storage, and for none.
const char* place_of(const TensorImpl& tensor) {
  return tensor.has_storage() && tensor.unsafe_storage() ? address_of(tensor) : nullptr;
}

// Type, device and layout. The keys tell sparse, negated, inference, fake and wrapped tensors from plain ones.
struct Form {
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::Device device;
  std::vector<int64_t> sizes, strides;

  explicit Form(const TensorImpl& t)
      : keys(t.key_set()), dtype(t.dtype()), device(t.device()), sizes(t.sizes().vec()), strides(t.strides().vec()) {}
  bool fits(const TensorImpl& t) const {
    return t.key_set() == keys && t.dtype() == dtype && t.device() == device && t.sizes().equals(sizes) &&
        t.strides().equals(strides);
  }
};

struct Known {
  const Object* object;
  const void* type;
  TensorImpl* tensor;  // null for other objects, and where a parameter is the name of its state
  const Form* form;
  const char* address;

  // The addresses of C++ objects are compared before the object is read: only then is it surely this one.
  bool is(const Object* now) const {
    return now == object && now->type == type &&
        (!tensor || (tensor_of(now) == tensor && form->fits(*tensor) && place_of(*tensor) == address));
  }
};

enum Role { kList, kParam, kOwner, kValue };  // of state: whose it is, and what it is

// Visits objects until `visit` returns false; `state` may be null. No code of Python runs meanwhile.
template <typename Visit> bool walk(Object* groups, Object* state, Visit visit) {
  for (int64_t g = 0; g < PyList_Size(groups); ++g) {
    Object* const params = PyDict_GetItemString(PyList_GetItem(groups, g), "params");
    if (!params || params->type != PyList_Type || !visit(params, kList)) return false;
    for (int64_t i = 0; i < PyList_Size(params); ++i)
      if (!visit(PyList_GetItem(params, i), kParam)) return false;
  }
  Object *param, *values, *name, *value;
  for (ssize_t at = 0; state && PyDict_Next(state, &at, &param, &values);) {
    if (values->type != PyDict_Type || !visit(param, kOwner)) return false;
    for (ssize_t in = 0; PyDict_Next(values, &in, &name, &value);)
      if (!visit(value, kValue)) return false;
  }
  return true;
}

// A parameter's gradient; null if it has none.
TensorImpl* grad_of(const TensorImpl& param) {
  TensorImpl* const grad = reinterpret_cast<TensorImpl* const&>(param.grad());  // all that an at::Tensor is
  return grad == c10::UndefinedTensorImpl::singleton() ? nullptr : grad;
}

bool is_apart(int64_t count, TensorImpl* const* tensors) {
  std::vector<std::pair<const char*, const char*>> extents;
  for (int64_t i = 0; i < count; ++i)
    if (const int64_t bytes = tensors[i]->numel() * int64_t(tensors[i]->itemsize()))
      extents.emplace_back(place_of(*tensors[i]), place_of(*tensors[i]) + bytes);
  std::sort(extents.begin(), extents.end());
  const auto overlap = [](auto& one, auto& next) { return next.first < one.second; };
  return std::adjacent_find(extents.begin(), extents.end(), overlap) == extents.end();
}

struct Plan {
  std::vector<Known> objects;  // as `walk` comes to them
  size_t held = 0;             // so many are parameters, and lists of these
  std::list<Form> forms;       // each once: few are read for many tensors; a list, as others point into it
  std::vector<std::pair<TensorImpl*, const Form*>> params;  // with the forms of their gradients; null without one
  std::vector<TensorImpl*> grads;
  std::vector<const char*> addresses;  // of the gradients' numbers

  const Form* form_of(const TensorImpl* tensor) {
    if (!tensor) return nullptr;
    const auto known = std::find_if(forms.begin(), forms.end(), [&](const Form& form) { return form.fits(*tensor); });
    return known == forms.end() ? &forms.emplace_back(*tensor) : &*known;
  }

  // False if something isn't as it can be noted.
  bool note(Object* groups, Object* state) {
    return walk(groups, state, [&](const Object* object, Role role) {
      TensorImpl* const tensor = role == kOwner ? nullptr : tensor_of(object);
      objects.push_back({object, object->type, tensor, form_of(tensor), tensor ? place_of(*tensor) : nullptr});
      held += role == kList || role == kParam;
      if (role != kParam || !tensor) return role != kParam;  // a parameter that isn't a plain tensor: no plan
      TensorImpl* const grad = grad_of(*tensor);
      params.emplace_back(tensor, form_of(grad));
      if (grad) grads.push_back(grad), addresses.push_back(place_of(*grad));
      return true;
    });
  }

  // 1 if everything is as it was noted, 2 if gradients only lie elsewhere, else 0.
  int64_t compare(Object* groups, Object* state) {
    size_t next = 0;
    const auto same = [&](const Object* now, Role) { return next < objects.size() && objects[next++].is(now); };
    // All of the noted objects, not only the first of them: a parameter that is gone would still be written.
    if (!walk(groups, state, same) || next != (state ? objects.size() : held)) return 0;
    bool moved = false;
    next = 0;
    for (const auto& [param, form] : params) {
      TensorImpl* const grad = grad_of(*param);
      if (!grad != !form) return 0;  // a step skips parameters without a gradient, so it is another step
      if (!grad) continue;
      const auto* object = reinterpret_cast<const Object*>(grad->pyobj_slot()->load_pyobj());
      if ((object && !tensor_of(object)) || !form->fits(*grad)) return 0;  // of a subclass, or of another layout
      const char* const address = place_of(*grad);
      moved |= address != addresses[next];
      grads[next] = grad;
      addresses[next++] = address;
    }
    // Elsewhere they may overlap, for which no step is planned: kernels take elements in any order.
    return !moved ? 1 : is_apart(int64_t(grads.size()), grads.data()) ? 2 : 0;
  }
};

// A gradient's memory and version. No other memory has the record at this address as long as this is held.
struct Mark {
  c10::StorageImpl* storage;
  const char* address;
  int64_t version;
  auto operator<=>(const Mark&) const = default;
};
using Marks = std::vector<Mark>;

Marks marks_of(int64_t count, TensorImpl* const* grads) {
  Marks marks;
  for (int64_t i = 0; i < count; ++i)
    if (grads[i]->has_storage() && grads[i]->unsafe_storage())  // sparse ones have none
      marks.push_back({grads[i]->unsafe_storage().unsafeGetStorageImpl(), place_of(*grads[i]),
                       grads[i]->is_inference() ? 0 : int64_t(grads[i]->version_counter().current_version())});
  return marks;
}
}  // namespace

extern "C" {

// Notes an optimizer's tensors; null if they are of kinds that can't be noted. `state` may be null.
Plan* plan_new(Object* groups, Object* state) try {
  auto plan = std::make_unique<Plan>();
  return plan->note(groups, state) ? plan.release() : nullptr;
} catch (const std::exception&) {  // memory that a tensor doesn't give out any more
  return nullptr;
}

// See `Plan::compare`. Writes the gradients' addresses to `grads`. A null `state` isn't compared.
int64_t plan_compare(Plan* plan, Object* groups, Object* state, const char** grads) try {
  const int64_t found = plan->compare(groups, state);
  if (found == 2) std::copy(plan->addresses.begin(), plan->addresses.end(), grads);
  return found;
} catch (const std::exception&) {
  return 0;
}

// The gradients' C++ objects, as `plan_compare` found them.
TensorImpl* const* plan_grads(const Plan* plan) { return plan->grads.data(); }

// Raises the versions of all parameters with gradients.
void plan_bump_versions(const Plan* plan) { return guarded([&] {
  for (const auto& [param, form] : plan->params) if (form) param->bump_version();
}); }

// Called with the capsule that owns one, as it is freed: in C, where no Ctrl-C is handled, which Python would swallow.
void plan_free(Object* capsule) { delete static_cast<Plan*>(PyCapsule_GetPointer(capsule, nullptr)); }

int64_t apart(int64_t count, TensorImpl* const* tensors) { return guarded([&] { return is_apart(count, tensors); }); }

// Marks gradients, as they are now, to recognize them later; keeps only the records of their memory.
Marks* marks_new(int64_t count, TensorImpl* const* grads) { return guarded([&] {
  auto* const marks = new Marks(marks_of(count, grads));
  for (const Mark& mark : *marks) c10::raw::weak_intrusive_ptr::incref(mark.storage);
  return marks;
}); }

// Are these among the marked gradients, none written or given other memory since?
int64_t marks_match(const Marks* marks, int64_t count, TensorImpl* const* grads) { return guarded([&] {
  const Marks now = marks_of(count, grads);
  if (now == *marks) return true;  // nearly always: only what was reordered, or is fewer, needs the set
  const std::set<Mark> known(marks->begin(), marks->end());
  return std::all_of(now.begin(), now.end(), [&](const Mark& mark) { return known.count(mark); });
}); }

// Notes the versions that these of the marked gradients have now.
void marks_renew(Marks* marks, int64_t count, TensorImpl* const* grads) { return guarded([&] {
  const Marks now = marks_of(count, grads);
  for (size_t i = 0; i < now.size(); ++i) {
    const auto renew = [&](Mark& mark) {
      const bool same = mark.storage == now[i].storage && mark.address == now[i].address;
      if (same) mark.version = now[i].version;
      return same;
    };
    if (i >= marks->size() || !renew((*marks)[i])) std::for_each(marks->begin(), marks->end(), renew);  // some are gone
  }
}); }

void marks_free(Object* capsule) {
  auto* const marks = static_cast<Marks*>(PyCapsule_GetPointer(capsule, nullptr));
  for (const Mark& mark : *marks) c10::raw::weak_intrusive_ptr::decref(mark.storage);
  delete marks;
}
}
