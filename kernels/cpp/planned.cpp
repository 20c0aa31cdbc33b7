// An optimizer's tensors as Python holds them: are they those that a step was planned for, and where are the gradients?
// Reads torch's objects by its headers, and Python's by its stable functions: its own headers may not be installed.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

struct Object {
  int64_t owners;
  const void* type;
};

extern "C" {
int64_t PyList_Size(Object*);
Object* PyList_GetItem(Object*, int64_t);
Object* PyDict_GetItem(Object*, Object*);
int PyDict_Next(Object*, int64_t*, Object**, Object**);
}

namespace {
using Tensor = c10::TensorImpl;

// What is the same for all plans: see `planned._python`.
struct Python {
  Object* params;  // "params", the key of a group's list
  const void *list, *dict, *tensor, *parameter;
  int64_t impl;  // where, in a tensor's object, the address of its C++ object stands
};

int64_t address_of(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage() || !tensor.unsafe_storage()) return 0;
  const auto begin = reinterpret_cast<int64_t>(tensor.unsafe_storage().data());
  return begin + tensor.storage_offset() * int64_t(tensor.itemsize());
}

// Type, device and layout. The keys tell sparse, negated, inference, fake and wrapped tensors from plain ones.
struct Form {
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::Device device;
  std::vector<int64_t> layout;

  explicit Form(const Tensor& t) : keys(t.key_set()), dtype(t.dtype()), device(t.device()) {
    layout.assign(t.sizes().begin(), t.sizes().end());
    layout.insert(layout.end(), t.strides().begin(), t.strides().end());
  }

  bool fits(const Tensor& t) const {
    const auto sizes = t.sizes(), strides = t.strides();
    return t.key_set() == keys && t.dtype() == dtype && t.device() == device &&
           sizes.size() + strides.size() == layout.size() && std::equal(sizes.begin(), sizes.end(), layout.begin()) &&
           std::equal(strides.begin(), strides.end(), layout.begin() + sizes.size());
  }
};

struct Known {
  const Object* object;
  const void* type;
  Tensor* tensor;  // null for other objects, and where a parameter is the name of its state
  int64_t form, address;
};

struct Plan {
  const Python* python;
  std::vector<Known> held, state;  // as `walk_params` and `walk_state` come to them
  std::vector<Form> forms;  // each once: few are read for many tensors
  std::vector<Tensor*> params;
  std::vector<int64_t> grad_forms;  // of each parameter; -1 if it has no gradient
  std::vector<Tensor*> grad_tensors;
  std::vector<int64_t> grads, bytes;
};

// These visit objects until `visit` returns false. No code of Python runs meanwhile.
template <typename Visit> bool walk_params(const Python& python, Object* groups, Visit visit) {
  for (int64_t g = 0; g < PyList_Size(groups); ++g) {
    Object* const list = PyDict_GetItem(PyList_GetItem(groups, g), python.params);
    if (!list || list->type != python.list || !visit(list, false)) return false;
    for (int64_t i = 0; i < PyList_Size(list); ++i)
      if (!visit(PyList_GetItem(list, i), true)) return false;
  }
  return true;
}

template <typename Visit> bool walk_state(const Python& python, Object* state, Visit visit) {
  Object *param, *values, *name, *value;
  for (int64_t at = 0; PyDict_Next(state, &at, &param, &values);) {
    if (values->type != python.dict || !visit(param, false)) return false;
    for (int64_t in = 0; PyDict_Next(values, &in, &name, &value);)
      if (!visit(value, true)) return false;
  }
  return true;
}

Tensor* tensor_in(const Python& python, const Object* object) {
  return *reinterpret_cast<Tensor* const*>(reinterpret_cast<const char*>(object) + python.impl);
}

// A parameter's gradient; null if it has none.
Tensor* grad_of(const Tensor& param) {
  Tensor* const grad = reinterpret_cast<Tensor* const&>(param.grad());  // all that an at::Tensor is
  return grad == c10::UndefinedTensorImpl::singleton() ? nullptr : grad;
}

int64_t form_of(Plan& plan, const Tensor& tensor) {
  auto& forms = plan.forms;
  const auto known = std::find_if(forms.begin(), forms.end(), [&](const Form& form) { return form.fits(tensor); });
  const int64_t place = known - forms.begin();
  if (known == forms.end()) forms.emplace_back(tensor);
  return place;
}

auto noting(Plan& plan, std::vector<Known>& all) {
  return [&](const Object* object, bool look) {
    const bool plain = object->type == plan.python->tensor || object->type == plan.python->parameter;
    Tensor* const tensor = look && plain ? tensor_in(*plan.python, object) : nullptr;
    const int64_t form = tensor ? form_of(plan, *tensor) : 0, address = tensor ? address_of(*tensor) : 0;
    all.push_back({object, object->type, tensor, form, address});
    return true;
  };
}

auto comparing(const Plan& plan, const std::vector<Known>& all, size_t& next) {
  return [&](const Object* object, bool) {
    if (next == all.size()) return false;
    const Known& known = all[next++];
    if (object != known.object || object->type != known.type) return false;
    if (!known.tensor) return true;
    // The addresses of C++ objects are compared before the object is read: only then is it surely this one.
    return tensor_in(*plan.python, object) == known.tensor && plan.forms[known.form].fits(*known.tensor) &&
           address_of(*known.tensor) == known.address;
  };
}

// False if something isn't as a plan can note it.
bool note(Plan& plan, Object* groups, Object* state) {
  if (!walk_params(*plan.python, groups, noting(plan, plan.held))) return false;
  for (const Known& known : plan.held) {
    if (known.type == plan.python->list) continue;
    if (!known.tensor) return false;
    Tensor* const grad = grad_of(*known.tensor);
    plan.params.push_back(known.tensor);
    plan.grad_forms.push_back(grad ? form_of(plan, *grad) : -1);
    if (!grad) continue;
    plan.grad_tensors.push_back(grad);
    plan.grads.push_back(address_of(*grad));
    plan.bytes.push_back(grad->numel() * int64_t(grad->itemsize()));
  }
  return !state || walk_state(*plan.python, state, noting(plan, plan.state));
}

bool is_apart(size_t count, const int64_t* address, const int64_t* bytes) {
  std::vector<std::pair<int64_t, int64_t>> extents;
  for (size_t i = 0; i < count; ++i)
    if (bytes[i]) extents.emplace_back(address[i], address[i] + bytes[i]);
  std::sort(extents.begin(), extents.end());
  for (size_t i = 1; i < extents.size(); ++i)
    if (extents[i].first < extents[i - 1].second) return false;
  return true;
}

// 1 if everything is as it was noted, 2 if gradients only lie elsewhere, else 0.
int64_t compare(Plan& plan, Object* groups, Object* state) {
  size_t held = 0, stated = 0;
  if (!walk_params(*plan.python, groups, comparing(plan, plan.held, held)) || held != plan.held.size()) return 0;
  if (state && (!walk_state(*plan.python, state, comparing(plan, plan.state, stated)) || stated != plan.state.size()))
    return 0;
  bool moved = false;
  for (size_t i = 0, next = 0; i < plan.params.size(); ++i) {
    Tensor* const grad = grad_of(*plan.params[i]);
    if (!grad != (plan.grad_forms[i] < 0)) return 0;
    if (!grad) continue;
    const auto* object = reinterpret_cast<const Object*>(grad->pyobj_slot()->load_pyobj());
    const bool plain = !object || object->type == plan.python->tensor || object->type == plan.python->parameter;
    if (!plain || !plan.forms[plan.grad_forms[i]].fits(*grad)) return 0;
    const int64_t address = address_of(*grad);
    moved |= address != plan.grads[next];
    plan.grad_tensors[next] = grad;
    plan.grads[next++] = address;
  }
  return !moved ? 1 : is_apart(plan.grads.size(), plan.grads.data(), plan.bytes.data()) ? 2 : 0;
}

// A gradient's memory and version. No other memory has the record at this address as long as this is held.
struct Mark {
  c10::StorageImpl* storage;
  int64_t address, version;
  bool operator<(const Mark& other) const {
    return std::tie(storage, address, version) < std::tie(other.storage, other.address, other.version);
  }
};
using Marks = std::vector<Mark>;

Marks marks_of(int64_t count, Tensor* const* grads) {
  Marks marks;
  for (int64_t i = 0; i < count; ++i)
    if (grads[i]->has_storage() && grads[i]->unsafe_storage())  // sparse ones have none
      marks.push_back({grads[i]->unsafe_storage().unsafeGetStorageImpl(), address_of(*grads[i]),
                       grads[i]->is_inference() ? 0 : int64_t(grads[i]->version_counter().current_version())});
  return marks;
}

template <typename Act> int64_t guarded(Act act) {
  try {
    return act();
  } catch (const std::exception&) {  // memory that a tensor doesn't give out any more
    return 0;
  }
}
}  // namespace

extern "C" {

// Notes an optimizer's tensors; 0 if they are of kinds that can't be noted. `state` may be null.
int64_t plan_new(const Python* python, Object* groups, Object* state) {
  return guarded([&]() -> int64_t {
    auto plan = std::make_unique<Plan>();
    plan->python = python;
    return note(*plan, groups, state) ? reinterpret_cast<int64_t>(plan.release()) : 0;
  });
}

// See `compare`. Writes the gradients' addresses to `grads`. A null `state` isn't compared.
int64_t plan_holds(Plan* plan, Object* groups, Object* state, int64_t* grads) {
  return guarded([&] {
    const int64_t found = compare(*plan, groups, state);
    if (found == 2) std::copy(plan->grads.begin(), plan->grads.end(), grads);
    return found;
  });
}

// Where the addresses of the gradients' C++ objects stand, as `plan_holds` found them.
int64_t plan_grads(const Plan* plan) { return reinterpret_cast<int64_t>(plan->grad_tensors.data()); }

// Raises the versions of all parameters with gradients.
int64_t plan_wrote(Plan* plan) {
  for (size_t i = 0; i < plan->params.size(); ++i)
    if (plan->grad_forms[i] >= 0) plan->params[i]->bump_version();
  return 1;
}

int64_t plan_free(Plan* plan) {
  delete plan;
  return 1;
}

int64_t apart(int64_t count, const int64_t* address, const int64_t* bytes) { return is_apart(count, address, bytes); }

// Marks gradients, as they are now, to recognize them later; keeps only the records of their memory.
int64_t marks_new(int64_t count, Tensor* const* grads) {
  auto* const marks = new Marks(marks_of(count, grads));
  for (const Mark& mark : *marks) c10::raw::weak_intrusive_ptr::incref(mark.storage);
  return reinterpret_cast<int64_t>(marks);
}

// Are these among the marked gradients, none written or given other memory since?
int64_t marks_match(const Marks* marks, int64_t count, Tensor* const* grads) {
  const Marks now = marks_of(count, grads);
  const auto same = [](const Mark& a, const Mark& b) { return !(a < b) && !(b < a); };
  if (std::equal(now.begin(), now.end(), marks->begin(), marks->end(), same)) return 1;
  const std::set<Mark> known(marks->begin(), marks->end());
  return std::all_of(now.begin(), now.end(), [&](const Mark& mark) { return known.count(mark); });
}

// Notes the versions that these of the marked gradients have now.
int64_t marks_renew(Marks* marks, int64_t count, Tensor* const* grads) {
  const Marks now = marks_of(count, grads);
  for (size_t i = 0; i < now.size(); ++i) {
    const auto renew = [&](Mark& mark) {
      const bool same = mark.storage == now[i].storage && mark.address == now[i].address;
      if (same) mark.version = now[i].version;
      return same;
    };
    if (i >= marks->size() || !renew((*marks)[i])) std::for_each(marks->begin(), marks->end(), renew);  // some are gone
  }
  return 1;
}

int64_t marks_free(Marks* marks) {
  for (const Mark& mark : *marks) c10::raw::weak_intrusive_ptr::decref(mark.storage);
  delete marks;
  return 1;
}
}
