// Objects of Python, by its stable functions, as its own headers may not be installed; and the tensors in them.
#pragma once
#include <c10/core/TensorImpl.h>

struct Object { int64_t owners; const void* type; };

extern "C" {
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

// Of a tensor that has a storage.
const char* address_of(const TensorImpl& tensor) {
  return tensor.numel() ? static_cast<const char*>(tensor.unsafe_storage().data()) +
      tensor.storage_offset() * int64_t(tensor.itemsize()) : nullptr;
}
}  // namespace

extern "C" void set_up(int64_t at, const void* tensor, const void* parameter) {
  tensor_at = at, tensor_types[0] = tensor, tensor_types[1] = parameter;
}
