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
	"errors"
	"fmt"
	"unsafe"
)

// Available says why there is no driver; nil where there is one with a GPU.
func Available() error {
	switch status := C.cudashim_status(); status {
	case 0:
		return nil
	case -1:
		return errors.New("no CUDA driver: " + C.GoString(C.cudashim_message()))
	case 100:
		return errors.New("the CUDA driver finds no GPU")
	case 34:
		return errors.New("libcuda.so.1 is a stub to link with, not a driver")
	default:
		return fmt.Errorf("the CUDA driver does not start: CUresult %d", int(status))
	}
}

// Symbol is the address of the driver's function of that name; nil where there is no such function.
func Symbol(name string) unsafe.Pointer {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	return C.cudashim_symbol(s)
}
