// Objects of Python, by its stable functions, as its own headers may not be installed; and the tensors in them.
#pragma once
#include <c10/core/TensorImpl.h>

#include <exception>
#include <string>
#include <type_traits>

struct Object { int64_t owners; const void* type; };

extern "C" {
extern Object* PyExc_RuntimeError;
void PyErr_SetString(Object*, const char*);
void* PyCapsule_GetPointer(Object*, const char*);
extern char _Py_NoneStruct[], _Py_FalseStruct[], PyList_Type[], PyDict_Type[];
Object* PyList_New(ssize_t);
ssize_t PyList_Size(Object*);
Object* PyList_GetItem(Object*, ssize_t);
int PyList_SetItem(Object*, ssize_t, Object*);
Object* PyTuple_GetItem(Object*, ssize_t);
Object* PyDict_GetItemString(Object*, const char*);
int PyDict_Next(Object*, ssize_t*, Object**, Object**);
Object* PyLong_FromVoidPtr(void*);
ssize_t PySet_Size(Object*);
int PySet_Add(Object*, Object*);
int PySet_Discard(Object*, Object*);
void Py_IncRef(Object*);
void Py_DecRef(Object*);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {
using c10::TensorImpl;
int64_t tensor_at;  // where, in a tensor's object, the address of its C++ object stands
const void* tensor_types[2];

// Null for other objects than plain tensors and parameters.
TensorImpl* tensor_of(const Object* object) {
  if (object->type != tensor_types[0] && object->type != tensor_types[1]) return nullptr;
  return *reinterpret_cast<TensorImpl* const*>(reinterpret_cast<const char*>(object) + tensor_at);
}

// Runs what an entry does. None may throw: what torch's functions throw becomes an error of Python's.
template <typename Entry> auto guarded(Entry entry) noexcept -> decltype(entry()) {
  try {
    return entry();
  } catch (const std::exception& error) {
    const std::string text = error.what();  // of torch's, the first line says what, the others where
    PyErr_SetString(PyExc_RuntimeError, text.substr(0, text.find('\n')).c_str());
  }
  if constexpr (!std::is_void_v<decltype(entry())>) return {};
}

// Of a tensor that has a storage.
const char* address_of(const TensorImpl& tensor) {
  return tensor.numel() ? static_cast<const char*>(tensor.unsafe_storage().data()) +
      tensor.storage_offset() * int64_t(tensor.itemsize()) : nullptr;
}
}  // namespace

extern "C" void set_up(int64_t at, const void* tensor, const void* parameter) {
  tensor_at = at, tensor_types[0] = tensor, tensor_types[1] = parameter;
}
