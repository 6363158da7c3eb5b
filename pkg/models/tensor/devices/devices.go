// Package devices opens what computes, by the names that people give it: cpu, cuda:0.
package devices

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
)

// Built says whether the program is built for GPUs: then it is worth a warning if Auto chooses the CPU.
const Built = cuda.Built

// Names of no device in particular.
const (
	Auto = "auto" // all GPUs that there are and that are new enough, else the CPU
	CPU  = "cpu"
)

// ErrUnavailable is wrapped by the errors for devices that this program or machine does not have.
var ErrUnavailable = errors.New("device not available")

// Device is one that was opened.
type Device struct {
	tensor.Device
	ID string // cpu, cuda:0
}

// Set is the devices that a process computes with, one at least.
type Set struct {
	Devices []Device
	// Note says why Auto chose the CPU though a GPU could be expected; else empty.
	Note string
	// Skipped says of each GPU that Auto left out beside others why it did.
	Skipped []string
}

// parseNames returns the numbers of the GPUs that the setting device names; none for auto and cpu.
// Anything else is an error with the names that are legal.
func parseNames(names string) (gpus []int, err error) {
	if names == Auto || names == CPU {
		return nil, nil
	}
	wrong := func(why string) error {
		return fmt.Errorf("device: %.80q: %s; must be auto, cpu, cuda:0, or several GPUs as cuda:0,cuda:1", names, why)
	}
	for name := range strings.SplitSeq(names, ",") {
		digits, ok := strings.CutPrefix(name, "cuda:")
		n, err := strconv.Atoi(digits)
		switch {
		case name == Auto || name == CPU:
			return nil, wrong(name + " stands alone")
		case !ok || err != nil || digits != strconv.Itoa(n) || n < 0:
			return nil, wrong(fmt.Sprintf("no device is called %q", name))
		case slices.Contains(gpus, n):
			return nil, wrong(name + " is there twice")
		}
		gpus = append(gpus, n)
	}
	return gpus, nil
}

// Available returns an error if a device of names is not on this machine, without opening one: at
// start, and for meander doctor. An error for a device that is not there wraps ErrUnavailable.
func Available(names string) error {
	gpus, err := parseNames(names)
	for _, n := range gpus {
		if fault := cuda.Available(n); fault != nil {
			err = errors.Join(err, unavailable(n, fault))
		}
	}
	return err
}

// GPUs is how many there are, and says of each that is too old which it is and what would have to be; the error says
// why there are none.
func GPUs() (n int, old []string, err error) {
	n, err = cuda.Count()
	for i := range n {
		if fault := cuda.Available(i); errors.Is(fault, cuda.ErrOld) {
			old = append(old, idOf(i)+": "+fault.Error())
		}
	}
	return n, old, err
}

// Options say how devices are opened.
type Options struct {
	// Threads is how many threads the CPU has; 0 is all cores.
	Threads int
	// Factors is the element type in which factors meet on a GPU; default F32.
	Factors tensor.DType
	// Deterministic is cuda.Options.Deterministic.
	Deterministic bool
	// Warn, where set, is told what makes a GPU slower than it could be, when it is opened or later. Several goroutines
	// call it.
	Warn func(error)
	// Profile, where set, is told how long each kernel of a GPU took. The GPU then waits for each kernel.
	Profile func(kernel string, took time.Duration)
}

// Open opens the devices of names: auto, cpu, or GPUs as cuda:0,cuda:1. auto is all GPUs that are
// new enough, or the CPU where there is none; Skipped and Note then say why. The caller closes the
// set. If one does not open, all are closed; an error for a device that is not there
// wraps ErrUnavailable.
func Open(names string, o Options) (*Set, error) {
	gpus, err := parseNames(names)
	switch {
	case err != nil:
		return nil, err
	case names == Auto:
		return openAuto(o, math.MaxInt)
	case names == CPU:
		return new(Set).withCPU(o)
	}
	return openGPUs(gpus, o)
}

// One opens the first device of names, for programs that use one at a time, such as benches.
// Several GPUs are an error.
func One(names string, o Options) (*Set, error) {
	gpus, err := parseNames(names)
	switch {
	case err != nil:
		return nil, err
	case len(gpus) > 1:
		return nil, fmt.Errorf("device: %q: %d GPUs; must be one here", names, len(gpus))
	case names == Auto:
		return openAuto(o, 1)
	}
	return Open(names, o)
}

// openAuto opens at most that many GPUs, or the CPU. It leaves out GPUs that are too old; one that
// does not open for another reason, such as another process that has it, is an error.
func openAuto(o Options, most int) (*Set, error) {
	count, err := cuda.Count()
	var gpus []int
	var skipped []string
	for n := 0; n < count && len(gpus) < most; n++ {
		if err := cuda.Available(n); errors.Is(err, cuda.ErrOld) {
			skipped = append(skipped, idOf(n)+": "+err.Error())
		} else {
			gpus = append(gpus, n)
		}
	}
	switch {
	case err != nil:
		return (&Set{Note: err.Error()}).withCPU(o)
	case len(gpus) == 0:
		return (&Set{Note: strings.Join(skipped, "; ")}).withCPU(o)
	}
	set, err := openGPUs(gpus, o)
	if err != nil {
		return nil, err
	}
	set.Skipped = skipped
	return set, nil
}

// openGPUs opens GPUs side by side. If one does not open, all are closed.
func openGPUs(gpus []int, o Options) (*Set, error) {
	opened, errs := make([]*cuda.Device, len(gpus)), make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, n := range gpus {
		warn := func(err error) {
			if o.Warn != nil {
				o.Warn(fmt.Errorf("%s: %w", idOf(n), err))
			}
		}
		wg.Go(func() {
			opened[i], errs[i] = cuda.Open(n, cuda.Options{
				Factors: o.Factors, Deterministic: o.Deterministic, Warn: warn, Profile: o.Profile,
			})
		})
	}
	wg.Wait()
	set, err := &Set{}, error(nil)
	for i, n := range gpus {
		if errs[i] != nil {
			err = errors.Join(err, unavailable(n, errs[i]))
			continue
		}
		set.Devices = append(set.Devices, Device{opened[i], idOf(n)})
	}
	if err != nil {
		return nil, errors.Join(err, set.Close())
	}
	return set, nil
}

// withCPU returns the set with the CPU as its device.
func (s *Set) withCPU(o Options) (*Set, error) {
	d, err := cpu.NewDevice(cpu.Options{Threads: o.Threads})
	if err != nil {
		return nil, err
	}
	s.Devices = []Device{{d, CPU}}
	return s, nil
}

func idOf(gpu int) string { return "cuda:" + strconv.Itoa(gpu) }

// unavailable is an error of a GPU as that of the field.
func unavailable(gpu int, err error) error {
	return &absent{fmt.Errorf("device: %s: %w", idOf(gpu), err)}
}

type absent struct{ error }

func (a *absent) Unwrap() []error { return []error{ErrUnavailable, a.error} }

// Close ends all of them.
func (s *Set) Close() error {
	var errs []error
	for _, d := range s.Devices {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}
