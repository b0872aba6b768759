"""The C text of the runner: it carries out the calls of a graph that `native_build` has written down as numbers.

In: nothing; the text depends on nothing, so it is compiled once for a machine and a torch. Out: ``SOURCE``, which
exports ``af_setup`` (takes the addresses of torch's functions, `native_library`) and METH_O functions of Python.
``af_entry`` has ``(program, objects)`` as its self and the list of a graph's inputs as its argument. It returns the
graph's results, or None where this call is Python's: a mode or a profiler is active, or an input is no plain tensor.
``af_look`` and ``af_collect`` are for the tensors of an optimizer's step (`native_library.Look` and ``Collect``).
Guarantee: no header but the C library's is needed; torch is reached through its C interface for ahead-of-time compiled
models (``aoti_torch_*``) and five functions of C++. A step that fails, or does not fit, is repeated by the Python
callable of that step, which raises eager's errors. Values are freed at their last use.

A step is a row of words: code, length, number of its Python callable, inputs, outputs, then numbers of its own. A
register is a Python object, or a tensor that Python has not seen yet, which costs less to make.
"""

from __future__ import annotations

# Codes of steps.
(
    BELOW, CALL, ITEM, DROP, KERNEL, MM, ADDMM, BMM, VIEW, TURN, SWAP, PERMUTE, UNSQUEEZE, SELECT, EXPAND, ALIAS,
) = range(16)  # fmt: skip
# Words before the steps: registers, inputs, results, 1 where these are a list; then the registers of the results.
HEAD = 4
MOST_DIMS = 8  # of a tensor that `af_look` describes
# What `af_setup` takes, in this order.
FUNCTIONS = (
    "aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides",
    "aoti_torch_get_dtype", "aoti_torch_empty_strided", "aoti_torch__reinterpret_tensor",
    "aoti_torch_new_tensor_handle", "aoti_torch_delete_tensor_object",
    "aoti_torch_cpu_mm_out", "aoti_torch_cpu_addmm_out", "aoti_torch_cpu_bmm_out",
    "aoti_torch_get_numel", "aoti_torch_get_layout", "aoti_torch_get_device_type",
    "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb", "_ZN2at12hasCallbacksEv",
    "_ZN3c104impl23ExcludeDispatchKeyGuardC1ENS_14DispatchKeySetE", "_ZN3c104impl23ExcludeDispatchKeyGuardD1Ev",
    "_Z16THPVariable_WrapRKN2at10TensorBaseE",
)  # fmt: skip

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AF_EXPORT __attribute__((visibility("default")))
#define DIMS 25

typedef struct { intptr_t references; void* type; } PyObject;
extern PyObject* PyTuple_GetItem(PyObject*, intptr_t);
extern intptr_t PyTuple_Size(PyObject*);
extern PyObject* PyTuple_New(intptr_t);
extern int PyTuple_SetItem(PyObject*, intptr_t, PyObject*);
extern PyObject* PyList_New(intptr_t);
extern int PyList_SetItem(PyObject*, intptr_t, PyObject*);
extern PyObject* PyList_GetItem(PyObject*, intptr_t);
extern intptr_t PyList_Size(PyObject*);
extern int PyList_SetSlice(PyObject*, intptr_t, intptr_t, PyObject*);
extern char* PyBytes_AsString(PyObject*);
extern PyObject* PyBytes_FromStringAndSize(const char*, intptr_t);
extern PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
extern PyObject* PySequence_GetItem(PyObject*, intptr_t);
extern PyObject* PySequence_Tuple(PyObject*);
extern void Py_IncRef(PyObject*);
extern void Py_DecRef(PyObject*);
extern PyObject* PyErr_NoMemory(void);
extern PyObject* PyErr_Occurred(void);
extern void PyErr_SetString(PyObject*, const char*);
extern PyObject* PyExc_ValueError;
extern PyObject _Py_NoneStruct;
extern PyObject PyTuple_Type;
extern PyObject PyList_Type;
extern PyObject PyDict_Type;
extern int PyList_Append(PyObject*, PyObject*);
extern PyObject* PyObject_GetAttr(PyObject*, PyObject*);
extern PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
extern int PyDict_Next(PyObject*, intptr_t*, PyObject**, PyObject**);
extern void* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void*);

typedef void* Handle; /* at::Tensor* */
typedef int64_t word;

static struct {
  int32_t (*data_ptr)(Handle, void**);
  int32_t (*dim)(Handle, word*);
  int32_t (*sizes)(Handle, word**);
  int32_t (*strides)(Handle, word**);
  int32_t (*dtype)(Handle, int32_t*);
  int32_t (*empty)(word, const word*, const word*, int32_t, int32_t, int32_t, Handle*);
  int32_t (*view)(Handle, word, const word*, const word*, word, Handle*);
  int32_t (*copy)(Handle, Handle*);
  int32_t (*free)(Handle);
  int32_t (*mm)(Handle, Handle, Handle);
  int32_t (*addmm)(Handle, Handle, Handle, Handle, double, double);
  int32_t (*bmm)(Handle, Handle, Handle);
  int32_t (*numel)(Handle, word*);
  int32_t (*layout)(Handle, int32_t*);
  int32_t (*device)(Handle, int32_t*);
  _Bool (*any_modes)(_Bool);
  _Bool (*is_recorded)(void);
  void (*enter)(void*, uint64_t);
  void (*leave)(void*);
  PyObject* (*wrap)(Handle);
} torch_;

static word payload; /* where a tensor of Python has its at::Tensor */
static void *tensor_type, *parameter_type;
static uint64_t below; /* the set of dispatch keys that a graph is run without */
static word plain;    /* bit by bit: the dtypes whose views are made here */
static word products; /* bit by bit: the dtypes whose products are made here */

/* functions, then: offset of the payload, the two types, the set of keys, the dtypes */
AF_EXPORT void af_setup(const word* table) {
  memcpy(&torch_, table, sizeof torch_);
  table += sizeof torch_ / sizeof(word);
  payload = table[0];
  tensor_type = (void*)table[1];
  parameter_type = (void*)table[2];
  below = (uint64_t)table[3];
  products = table[4], plain = table[5];
}

typedef struct { PyObject* py; Handle tensor; } Register;

static inline Handle inside(PyObject* object) {
  return object->type == tensor_type || object->type == parameter_type ? (Handle)((char*)object + payload) : NULL;
}

static void drop(Register* r) {
  if (r->py) Py_DecRef(r->py);
  else if (r->tensor) torch_.free(r->tensor);
  r->py = NULL;
  r->tensor = NULL;
}

/* The value as an object of Python, which the register owns; NULL with an error set. */
static PyObject* as_object(Register* r) {
  if (!r->py && r->tensor) {
    PyObject* const made = torch_.wrap(r->tensor);
    if (!made) return NULL;
    torch_.free(r->tensor);
    r->py = made;
    r->tensor = inside(made);
  }
  if (!r->py) PyErr_SetString(PyExc_ValueError, "expected a value, found none; report this");
  return r->py;
}

static void put(Register* r, PyObject* object) {
  r->py = object;
  r->tensor = inside(object);
}

/* ---- a step by its Python callable ---- */

static int call(const word* w, Register* regs, PyObject* objects) {
  const word inputs = w[3], *in = w + 4, outputs = in[inputs], *out = in + inputs + 1;
  PyObject* given[inputs + 1];
  for (word i = 0; i < inputs; ++i)
    if (!(given[i + 1] = as_object(regs + in[i]))) return -1;
  PyObject* const made = PyObject_Vectorcall(
      PyTuple_GetItem(objects, w[2]), given + 1, (size_t)inputs | (size_t)1 << (8 * sizeof(size_t) - 1), NULL);
  if (!made) return -1;
  if (outputs == 1) {
    put(regs + out[0], made);
    return 0;
  }
  PyObject* const several = made->type == (void*)&PyTuple_Type ? (Py_IncRef(made), made) : PySequence_Tuple(made);
  Py_DecRef(made);
  if (!several) return -1;
  const int fits = PyTuple_Size(several) == outputs;
  for (word i = 0; fits && i < outputs; ++i) {
    PyObject* const item = PyTuple_GetItem(several, i);
    Py_IncRef(item);
    put(regs + out[i], item);
  }
  Py_DecRef(several);
  if (!fits) PyErr_SetString(PyExc_ValueError, "expected as many results as a step has outputs; report this");
  return fits ? 0 : -1;
}

/* ---- steps in C: 0, or -1 where the Python callable must do it ---- */

static int empty(const word* spec, Handle* made) { /* dtype, dims, sizes, strides */
  return torch_.empty(spec[1], spec + 2, spec + 2 + spec[1], (int32_t)spec[0], 0, 0, made) ? -1 : 0;
}

static int run_kernel(const word* w, Register* regs) {
  const word inputs = w[3], *in = w + 4, outputs = in[inputs], *out = in + inputs + 1, *own = out + outputs;
  int (*const kernel)(const word*, void**) = (int (*)(const word*, void**))own[0];
  const word* const sizes = (const word*)own[1];
  void* pointers[inputs + outputs];
  Register made[outputs];
  own += 2;
  for (word i = 0; i < inputs; ++i)
    if (!regs[in[i]].tensor || torch_.data_ptr(regs[in[i]].tensor, pointers + i)) return -1;
  word number = 0;
  int failed = 0;
  for (; number < outputs && !failed; ++number, own += *own + 1) { /* length; input it is written into, or its spec */
    Register* const r = made + number;
    r->py = NULL;
    r->tensor = NULL;
    if (*own == 1) {
      const Register* const source = regs + in[own[1]];
      if (source->py) *r = *source, Py_IncRef(r->py);
      else failed = torch_.copy(source->tensor, &r->tensor);
    } else failed = empty(own + 1, &r->tensor);
    if (!failed) failed = torch_.data_ptr(r->tensor, pointers + inputs + number);
  }
  if (!failed) {
    void* const thread = PyEval_SaveThread();
    failed = kernel(sizes, pointers);
    PyEval_RestoreThread(thread);
  }
  for (word i = 0; i < number; ++i) {
    if (failed) drop(made + i);
    else regs[out[i]] = made[i];
  }
  return failed ? -1 : 0;
}

static int run_product(const word* w, Register* regs) {
  const word code = w[0], inputs = w[3], *in = w + 4, rank = code == @BMM@ ? 3 : 2;
  const Handle a = regs[in[inputs - 2]].tensor, b = regs[in[inputs - 1]].tensor;
  const Handle bias = code == @ADDMM@ ? regs[in[0]].tensor : a;
  int32_t type, other, third;
  word dims_a, dims_b, *size_a, *size_b, size[3], stride[3];
  Handle made;
  if (!a || !b || !bias || torch_.dtype(a, &type) || torch_.dtype(b, &other) || torch_.dtype(bias, &third)) return -1;
  if (type != other || type != third || !(products >> type & 1)) return -1;
  if (torch_.dim(a, &dims_a) || torch_.dim(b, &dims_b) || dims_a != rank || dims_b != rank) return -1;
  if (torch_.sizes(a, &size_a) || torch_.sizes(b, &size_b) || size_a[rank - 1] != size_b[rank - 2]) return -1;
  size[0] = size_a[0];
  size[rank - 2] = size_a[rank - 2];
  size[rank - 1] = size_b[rank - 1];
  if (size[0] != size_b[0] && rank == 3) return -1;
  stride[rank - 1] = 1;
  for (word d = rank - 2; d >= 0; --d) stride[d] = stride[d + 1] * (size[d + 1] > 1 ? size[d + 1] : 1);
  if (torch_.empty(rank, size, stride, type, 0, 0, &made)) return -1;
  void* const thread = PyEval_SaveThread();
  const int failed = code == @MM@ ? torch_.mm(made, a, b)
                   : code == @BMM@ ? torch_.bmm(made, a, b)
                   : torch_.addmm(made, bias, a, b, 1.0, 1.0);
  PyEval_RestoreThread(thread);
  if (failed) {
    torch_.free(made);
    return -1;
  }
  Register* const r = regs + in[inputs + 1];
  r->py = NULL;
  r->tensor = made;
  return 0;
}

/* Strides of the same elements under other sizes, where no element need be copied for it. */
static int restrided(word dims, const word* size, const word* stride, word wanted, const word* new_size,
                     word* new_stride) {
  word old = 1, now = 1, at = wanted - 1, elements = 1, found = 1, base;
  for (word d = 0; d < dims; ++d) elements *= size[d];
  for (word d = 0; d < wanted; ++d) found *= new_size[d];
  if (elements != found || !elements || !dims) return -1;
  base = stride[dims - 1];
  for (word d = dims - 1; d >= 0; --d) {
    old *= size[d];
    if (d && (size[d - 1] == 1 || stride[d - 1] == old * base)) continue;
    while (at >= 0 && (now < old || new_size[at] == 1)) {
      new_stride[at] = now * base;
      now *= new_size[at--];
    }
    if (now != old) return -1;
    if (d) {
      base = stride[d - 1];
      now = old = 1;
    }
  }
  return at == -1 ? 0 : -1;
}

static int run_view(const word* w, Register* regs) {
  const word *in = w + 4, *own = in + 3, count = *own;
  const Handle source = regs[in[0]].tensor;
  word dims, *old_size, *old_stride, size[DIMS], stride[DIMS], offset = 0, a, b;
  Handle made;
  if (!source || torch_.dim(source, &dims) || dims >= DIMS || count >= DIMS) return -1;
  if (torch_.sizes(source, &old_size) || torch_.strides(source, &old_stride)) return -1;
  int32_t type;
  if (torch_.dtype(source, &type) || !(plain >> type & 1)) return -1; /* a quantised tensor has more than elements */
  ++own;
  word wanted = dims;
  switch (w[0]) {
    case @ALIAS@:
      memcpy(size, old_size, dims * sizeof(word));
      memcpy(stride, old_stride, dims * sizeof(word));
      break;
    case @VIEW@:
      wanted = count;
      word known = 1, open = -1, elements = 1;
      for (word d = 0; d < dims; ++d) elements *= old_size[d];
      for (word d = 0; d < count; ++d) {
        if ((size[d] = own[d]) < 0) {
          if (open >= 0 || own[d] != -1) return -1;
          open = d;
        } else known *= own[d];
      }
      if (open >= 0) {
        if (!known || elements % known) return -1;
        size[open] = elements / known;
      }
      if (restrided(dims, old_size, old_stride, count, size, stride)) return -1;
      break;
    case @TURN@:
      if (dims != 2) return -1; /* fall through */
    case @SWAP@:
      memcpy(size, old_size, dims * sizeof(word));
      memcpy(stride, old_stride, dims * sizeof(word));
      a = own[0] < 0 ? own[0] + dims : own[0];
      b = own[1] < 0 ? own[1] + dims : own[1];
      if (a < 0 || b < 0 || a >= dims || b >= dims) return -1;
      size[a] = old_size[b], stride[a] = old_stride[b];
      size[b] = old_size[a], stride[b] = old_stride[a];
      break;
    case @PERMUTE@: {
      uint64_t seen = 0;
      if (count != dims) return -1;
      for (word d = 0; d < dims; ++d) {
        a = own[d] < 0 ? own[d] + dims : own[d];
        if (a < 0 || a >= dims || seen >> a & 1) return -1;
        seen |= (uint64_t)1 << a;
        size[d] = old_size[a], stride[d] = old_stride[a];
      }
      break;
    }
    case @UNSQUEEZE@:
      wanted = dims + 1;
      a = own[0] < 0 ? own[0] + dims + 1 : own[0];
      if (a < 0 || a > dims) return -1;
      for (word d = 0, from = 0; d < wanted; ++d) {
        if (d == a) size[d] = 1, stride[d] = a < dims ? old_size[a] * old_stride[a] : 1;
        else size[d] = old_size[from], stride[d] = old_stride[from], ++from;
      }
      break;
    case @SELECT@:
      wanted = dims - 1;
      a = own[0] < 0 ? own[0] + dims : own[0];
      if (a < 0 || a >= dims) return -1;
      b = own[1] < 0 ? own[1] + old_size[a] : own[1];
      if (b < 0 || b >= old_size[a]) return -1;
      offset = b * old_stride[a];
      for (word d = 0, to = 0; d < dims; ++d)
        if (d != a) size[to] = old_size[d], stride[to] = old_stride[d], ++to;
      break;
    case @EXPAND@:
      wanted = count;
      if (wanted < dims || !dims) return -1;
      for (word d = wanted - 1, from = dims - 1; d >= 0; --d, --from) {
        const word has = from >= 0 ? old_size[from] : 1;
        /* a new dim goes on where the one behind it ends, as in aten */
        const word step = from >= 0 ? old_stride[from] : d + 1 < wanted ? size[d + 1] * stride[d + 1] : 1;
        size[d] = own[d] == -1 ? has : own[d];
        if (size[d] < 0 || (own[d] == -1 && from < 0)) return -1;
        if (size[d] != has && has != 1) return -1;
        stride[d] = size[d] != has ? 0 : step;
      }
      break;
    default:
      return -1;
  }
  if (torch_.view(source, wanted, size, stride, offset, &made)) return -1;
  Register* const r = regs + in[2];
  r->py = NULL;
  r->tensor = made;
  return 0;
}

static int take_item(const word* w, Register* regs) {
  const word* const in = w + 4;
  PyObject *const several = regs[in[0]].py, *item;
  if (!several) return -1;
  if (several->type == (void*)&PyTuple_Type) {
    if (in[3] < 0 || in[3] >= PyTuple_Size(several)) return -1;
    item = PyTuple_GetItem(several, in[3]);
    Py_IncRef(item);
  } else return -1;
  put(regs + in[2], item);
  return 0;
}

/* None: this call is Python's. */
static PyObject* decline(void) {
  if (PyErr_Occurred()) return NULL;
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

/* ---- a whole graph ---- */

static int run(const word* w, const word* end, Register* regs, PyObject* objects, void* guard, int* is_below) {
  for (; w < end; w += w[1]) {
    int left = -1;
    switch (w[0]) {
      case @BELOW@:
        torch_.enter(guard, below);
        *is_below = 1;
        continue;
      case @DROP@:
        for (word i = 2; i < w[1]; ++i) drop(regs + w[i]);
        continue;
      case @CALL@: break;
      case @ITEM@: left = take_item(w, regs); break;
      case @KERNEL@: left = run_kernel(w, regs); break;
      case @MM@: case @ADDMM@: case @BMM@: left = run_product(w, regs); break;
      default: left = run_view(w, regs);
    }
    if (left && call(w, regs, objects)) return -1;
  }
  return 0;
}

AF_EXPORT PyObject* af_entry(PyObject* self, PyObject* list) {
  PyObject *const bytes = PyTuple_GetItem(self, 0), *const objects = PyTuple_GetItem(self, 1);
  const word *const program = (const word*)PyBytes_AsString(bytes), count = program[0], inputs = program[1];
  const word results = program[2], *const result = program + @HEAD@, *const steps = result + results + 1;
  if (PyList_Size(list) != inputs || torch_.any_modes(0) || torch_.is_recorded()) goto decline;
  for (word i = 0; i < inputs; ++i) {
    PyObject* const object = PyList_GetItem(list, i);
    if (steps[i] && !inside(object)) goto decline;
  }
  Register few[256], *const regs = count <= 256 ? few : malloc(count * sizeof(Register));
  if (!regs) return PyErr_NoMemory();
  memset(regs, 0, count * sizeof(Register));
  for (word i = 0; i < inputs; ++i) {
    PyObject* const object = PyList_GetItem(list, i);
    Py_IncRef(object);
    put(regs + i, object);
  }
  Py_IncRef(self); /* the program may be replaced while it runs */
  PyObject* found = NULL;
  word guard[4];
  int is_below = 0;
  if (!PyList_SetSlice(list, 0, inputs, NULL)) {
    const int failed = run(steps + inputs, steps + result[results], regs, objects, guard, &is_below);
    if (is_below) torch_.leave(guard);
    if (!failed) {
      found = program[3] ? PyList_New(results) : PyTuple_New(results);
      for (word i = 0; found && i < results; ++i) {
        PyObject* const object = as_object(regs + result[i]);
        if (!object) {
          Py_DecRef(found);
          found = NULL;
          break;
        }
        Py_IncRef(object);
        if (program[3]) PyList_SetItem(found, i, object);
        else PyTuple_SetItem(found, i, object);
      }
    }
  }
  /* A value's end may run Python: an error that is under way is kept by the interpreter. */
  for (word i = 0; i < count; ++i) drop(regs + i);
  if (regs != few) free(regs);
  Py_DecRef(self);
  return found;
decline:
  return decline();
}

/* ---- the tensors of an optimizer's step ---- */

/* The words of a strided tensor on the CPU: its object, address, elements, dtype, dims, strides. Their number, or 0. */
static word describe(PyObject* object, word* out) {
  const Handle tensor = inside(object);
  int32_t layout, device, type;
  word *strides, dims;
  if (!tensor || torch_.layout(tensor, &layout) || layout || torch_.device(tensor, &device) || device) return 0;
  if (torch_.dtype(tensor, &type) || torch_.numel(tensor, out + 2)) return 0;
  if (torch_.dim(tensor, &dims) || dims > @MOST_DIMS@ || torch_.strides(tensor, &strides)) return 0;
  if (torch_.data_ptr(tensor, (void**)(out + 1))) return 0;
  out[0] = (word)object;
  out[3] = type;
  out[4] = dims;
  memcpy(out + 5, strides, dims * sizeof(word));
  return 5 + dims;
}

AF_EXPORT PyObject* af_look(PyObject* self, PyObject* lists) {
  const word count = PyTuple_Size(lists);
  for (word l = 0; l < count; ++l)
    if (PyTuple_GetItem(lists, l)->type != (void*)&PyList_Type) return decline();
  if (count < 2) return decline();
  PyObject* const grads = PyTuple_GetItem(lists, 0);
  const word each = PyList_Size(grads);
  word* const words = malloc((1 + (count - 1) * each * (5 + @MOST_DIMS@) + each) * sizeof(word));
  if (!words) return PyErr_NoMemory();
  word used = 0, like = 0, grad[5 + @MOST_DIMS@];
  for (word l = 1; l < count; ++l) {
    PyObject* const list = PyTuple_GetItem(lists, l);
    if (PyList_Size(list) != each) goto unlike;
    for (word i = 0; i < each; ++i) {
      const word length = describe(PyList_GetItem(list, i), words + used);
      if (!length) goto unlike;
      used += length;
    }
  }
  for (word i = 0; i < each; ++i, like += 5 + words[like + 4]) { /* each gradient is laid out like its parameter */
    PyObject* const object = PyList_GetItem(grads, i);
    const word length = object->type == tensor_type ? describe(object, grad) : 0;
    if (!length || memcmp(grad + 2, words + like + 2, (3 + words[like + 4]) * sizeof(word))) goto unlike;
    words[used + i] = grad[1];
  }
  PyObject* const found = PyBytes_FromStringAndSize((const char*)words, (used + each) * sizeof(word));
  free(words);
  return found;
unlike:
  free(words);
  return decline();
}

/* Whether a step may have this tensor: strided, and of a real dtype. */
static int is_usual(PyObject* object) {
  const Handle tensor = inside(object);
  int32_t layout, type;
  return tensor && !torch_.layout(tensor, &layout) && !layout && !torch_.dtype(tensor, &type) && plain >> type & 1;
}

/* self: "grad", then names of states. given: a list of parameters, a dict of their states. */
AF_EXPORT PyObject* af_collect(PyObject* self, PyObject* given) {
  PyObject *const params = PyTuple_GetItem(given, 0), *const states = PyTuple_GetItem(given, 1), *key, *state;
  const word names = PyTuple_Size(self), each = PyList_Size(params);
  intptr_t place = 0;
  PyObject* const found = PyTuple_New(names + 1);
  for (word l = 0; found && l <= names; ++l) {
    PyObject* const list = PyList_New(0);
    if (!list || PyTuple_SetItem(found, l, list)) goto unusual;
  }
  for (word i = 0; found && i < each; ++i) {
    PyObject* const param = PyList_GetItem(params, i); /* hashing may let another thread shorten the list */
    if (!param || !is_usual(param) || PyList_Append(PyTuple_GetItem(found, 0), param)) goto unusual;
    PyObject* const grad = PyObject_GetAttr(param, PyTuple_GetItem(self, 0));
    const int has_grad = grad && is_usual(grad) && !PyList_Append(PyTuple_GetItem(found, 1), grad);
    if (grad) Py_DecRef(grad);
    if (grad == &_Py_NoneStruct) {
      const word last = PyList_Size(PyTuple_GetItem(found, 0)) - 1;
      if (PyList_SetSlice(PyTuple_GetItem(found, 0), last, last + 1, NULL)) goto unusual;
      continue;
    }
    if (!has_grad) goto unusual;
    /* States are mostly in the order of their parameters: then nothing is hashed. */
    if (!PyDict_Next(states, &place, &key, &state) || key != param) state = PyDict_GetItemWithError(states, param);
    if (!state || state->type != (void*)&PyDict_Type) goto unusual;
    for (word l = 1; l < names; ++l) {
      PyObject* const value = PyDict_GetItemWithError(state, PyTuple_GetItem(self, l));
      if (!value || PyList_Append(PyTuple_GetItem(found, l + 1), value)) goto unusual;
    }
  }
  return found;
unusual:
  Py_DecRef(found);
  return decline();
}
"""
for _name, _value in {
    "BELOW": BELOW, "CALL": CALL, "ITEM": ITEM, "DROP": DROP, "KERNEL": KERNEL, "MM": MM, "ADDMM": ADDMM, "BMM": BMM,
    "VIEW": VIEW, "TURN": TURN, "SWAP": SWAP, "PERMUTE": PERMUTE, "UNSQUEEZE": UNSQUEEZE, "SELECT": SELECT,
    "EXPAND": EXPAND, "ALIAS": ALIAS, "HEAD": HEAD, "MOST_DIMS": MOST_DIMS,
}.items():  # fmt: skip
    SOURCE = SOURCE.replace(f"@{_name}@", str(_value))
