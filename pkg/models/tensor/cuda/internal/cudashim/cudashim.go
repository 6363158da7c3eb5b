//go:build cuda

// Package cudashim is the symbols of the CUDA driver, which it opens when the process starts: a
// program with it runs on machines without NVIDIA software, and can say why there is no GPU.
package cudashim

/*
#cgo LDFLAGS: -ldl -L${SRCDIR}/lib
#include <stdlib.h>
int cudashim_status(void);
const char *cudashim_message(void);
void *cudashim_symbol(const char *name);
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Available says why there is no driver, and what would have to be; nil where there is one with a
// GPU. The codes are of CUresult.
func Available() error {
	why, fix := "", ""
	switch status := C.cudashim_status(); status {
	case 0:
		return nil
	case -1:
		why = "no CUDA driver: " + C.GoString(C.cudashim_message())
		fix = "install NVIDIA's driver (in a container: give it the GPUs, --gpus all)"
	case 100:
		why = "the CUDA driver finds no GPU"
		fix = "show it one (CUDA_VISIBLE_DEVICES; in a container --gpus all)"
	case 34:
		why = "libcuda.so.1 is a stub to link with, not a driver (CUresult 34)"
		fix = "take it out of LD_LIBRARY_PATH, and install NVIDIA's driver"
	case 36:
		why = "the CUDA driver is older than the CUDA beside it (CUresult 36)"
		fix = "install a newer driver"
	case 802:
		why = "the GPUs are not ready (CUresult 802)"
		fix = "start nvidia-fabricmanager, of the driver's version, on a machine with NVSwitch"
	case 803:
		why = "the CUDA driver's library and its kernel module have different versions (CUresult 803)"
		fix = "restart the machine, or take another libcuda.so.1 out of LD_LIBRARY_PATH"
	case 804:
		why = "the CUDA driver of cuda-compat does not work with these GPUs (CUresult 804)"
		fix = "take it out of LD_LIBRARY_PATH, and install a newer driver"
	default:
		why = fmt.Sprintf("the CUDA driver does not start (CUresult %d)", int(status))
		fix = "look for the reason in dmesg and nvidia-smi"
	}
	return fmt.Errorf("%s; must be cpu, or %s", why, fix)
}

// Symbol is the address of the driver's function of that name; nil where there is no such function.
func Symbol(name string) unsafe.Pointer {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	return C.cudashim_symbol(s)
}
