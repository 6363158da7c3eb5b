package driver_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// A GPU is lost after an error that only a new process gets rid of, and after no other: a process
// that ends for one of those would end for nothing.
func TestCode_Lost(t *testing.T) {
	for _, tt := range []struct {
		code driver.Code
		lost bool
		name string // in NVIDIA's header, less CUDA_ERROR_
	}{
		{2, false, "OUT_OF_MEMORY"},
		{46, true, "DEVICE_UNAVAILABLE"},
		{214, true, "ECC_UNCORRECTABLE"},
		{218, false, "INVALID_PTX"},
		{220, true, "NVLINK_UNCORRECTABLE"},
		{225, false, "UNSUPPORTED_DEVSIDE_SYNC"},
		{226, true, "CONTAINED"},
		{500, false, "NOT_FOUND"},
		{700, true, "ILLEGAL_ADDRESS"},
		{701, false, "LAUNCH_OUT_OF_RESOURCES"},
		{702, true, "LAUNCH_TIMEOUT"},
		{708, false, "PRIMARY_CONTEXT_ACTIVE"},
		{709, true, "CONTEXT_IS_DESTROYED"},
		{712, false, "HOST_MEMORY_ALREADY_REGISTERED"},
		{719, true, "LAUNCH_FAILED"},
		{720, false, "COOPERATIVE_LAUNCH_TOO_LARGE"},
		{721, true, "TENSOR_MEMORY_LEAK"},
		{802, false, "SYSTEM_NOT_READY"},
		{809, false, "MPS_MAX_CONNECTIONS_REACHED"},
		{810, true, "MPS_CLIENT_TERMINATED"},
		{811, false, "CDP_NOT_SUPPORTED"},
		{910, false, "GRAPH_EXEC_UPDATE_FAILURE"},
		{911, true, "EXTERNAL_DEVICE"},
		{912, false, "INVALID_CLUSTER_SIZE"},
		{999, true, "UNKNOWN"},
	} {
		if got := tt.code.Lost(); got != tt.lost {
			t.Errorf("%s (%v): lost is %v, want %v", tt.name, tt.code, got, tt.lost)
		}
	}
	for _, code := range []driver.Code{226, 721, 810, 911} {
		if text := code.Error(); strings.HasPrefix(text, "CUresult") {
			t.Errorf("%s: no words", text)
		}
	}
}
