package devices_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
)

func TestAvailable_Names(t *testing.T) {
	for names, want := range map[string]string{
		"auto": "", "cpu": "", "cuda:0": "", "cuda:0,cuda:1": "", "cuda:12": "",
		"":              `device: "": no device is called ""; must be auto, cpu, cuda:0`,
		"gpu":           `device: "gpu": no device is called "gpu"; must be`,
		"cuda":          `no device is called "cuda"`,
		"cuda:00":       `no device is called "cuda:00"`,
		"cuda:-1":       `no device is called "cuda:-1"`,
		"cuda:0,":       `no device is called ""`,
		"cpu,cuda:0":    "cpu stands alone",
		"cuda:0,auto":   "auto stands alone",
		"cuda:1,cuda:1": "cuda:1 is there twice",
	} {
		err := devices.Available(names)
		if errors.Is(err, devices.ErrUnavailable) {
			err = nil // a name there is, of a GPU there is not
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("Available(%q) = %v, want %q", names, err, want)
		}
	}
}

// Where there is no GPU, auto takes the CPU and says why; a GPU that was asked for is an error
// with the reason, and what would have to be.
func TestOpen_WithoutGPU(t *testing.T) {
	reason := func() string {
		_, err := cuda.Count()
		if err == nil {
			t.Skip("there is a GPU: what is said without one was not tested")
		}
		return err.Error()
	}()
	for _, open := range []func(string, devices.Options) (*devices.Set, error){devices.Open, devices.One} {
		set, err := open("auto", devices.Options{Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		if len(set.Devices) != 1 || set.Devices[0].ID != "cpu" || set.Note != reason {
			t.Errorf("auto is %+v, want the CPU because %s", set, reason)
		}
		if err := set.Close(); err != nil {
			t.Error(err)
		}
		_, err = open("cuda:1", devices.Options{})
		for _, err := range []error{err, devices.Available("cuda:1")} {
			if !errors.Is(err, devices.ErrUnavailable) || err.Error() != "device: cuda:1: "+reason ||
				!strings.Contains(reason, "; must be cpu, or ") {
				t.Errorf("cuda:1: %v, want the reason %s", err, reason)
			}
		}
	}
	if _, err := devices.One("cuda:0,cuda:1", devices.Options{}); err == nil ||
		!strings.Contains(err.Error(), "must be one here") {
		t.Errorf("One of two: %v", err)
	}
	if err := errors.Join(devices.Available("auto"), devices.Available("cpu")); err != nil {
		t.Error(err)
	}
}
