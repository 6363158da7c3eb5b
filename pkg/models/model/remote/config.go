// Package remote has models whose network another process computes: a worker, in another language, over a stream.
// Open starts a worker or joins one, and returns a lora.Adaptable; schedule, noise and transitions stay here.
//
// A worker that is lost costs its calls, not the samples: it is started or joined again and the calls are repeated,
// because they change nothing. While it is lost again and again, calls fail with model.ErrAway; one in which it is lost
// each time, with model.ErrKills. Only a worker that has come back with another model is tensor.ErrDeviceLost. Encoded
// prompts and adapters are sent again when the worker says that it lacks them.
package remote

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// Config says which worker computes a model.
type Config struct {
	// Address joins a worker that others started: unix:/PATH, HOST:PORT, or tls:HOST:PORT with a certificate that
	// the system trusts. Empty: a worker is started, and ends with this process.
	Address string
	// Token is sent to a worker at HOST:PORT.
	Token string
	// Device and DType are those of a worker that is started: cpu, cuda:0, ...; f32, bf16, f16; or auto.
	Device, DType string
	// Deterministic has the worker compute row by row, with one algorithm for each operation.
	Deterministic bool
	Options
	// Threads is how many threads of the CPU a started worker uses; 0: it chooses.
	Threads int
	// Patience is the least time after which a call without an answer counts as lost; at least MinPatience.
	Patience time.Duration
	// Wait bounds how long a worker at Address is waited for; 0: as long as the context lasts.
	Wait time.Duration
	// Adapter is a LoRA in PEFT's form to add, a file or a folder; AdapterScale multiplies its changes, default 1.
	Adapter      string
	AdapterScale float64
	// PromptCacheBytes bounds the memory of encoded prompts; 0 is 256 MiB, a negative number disables the cache.
	PromptCacheBytes int
	// Log is told what happens to the worker, and what it writes on stderr; nil: nothing is.
	Log func(Event)
	// Tested has Inspect wait until the worker has read the weights and tested the model.
	Tested bool
	// Spare keeps the worker that Inspect starts, for an Open with the same settings; nil: each starts its own.
	Spare *Spare
	// Hashes is model.Options.Hashes.
	Hashes *safetensors.Hashes
}

// Options are settings of a worker that is started, with the names that programs give them.
type Options struct {
	Compile           bool   `key:"compile" help:"with --engine torch: compile the network; a slow start, then faster steps"`
	VAETiling         bool   `key:"vae_tiling" help:"with --engine torch: decode in tiles, which needs less memory; pixels differ a little where tiles meet"`
	Generic           bool   `key:"generic" help:"with --engine torch: compute the model's pipeline of diffusers as a whole, also where its network is known"`
	TrustClass        bool   `key:"trust_class" help:"with --engine torch: try a class of diffusers that is not among those that are tested"`
	Family            string `key:"family" help:"with --engine torch: FILE.py:NAME, a family or a pipeline of your own, a class of that Python file"`
	Network           string `key:"network" help:"with --engine torch: what computes the network, diffusers or vllm-omni, the engine of vLLM-Omni; default diffusers"`
	TextEncoderDevice string `key:"text_encoder_device" help:"with --engine torch: device of the text encoders, such as cpu or cuda:1, if one has no memory for all; default the same"`
}

// Event is something to log.
type Event struct {
	// Err is why the worker was lost; nil: nothing is wrong.
	Err error
	// Text is what happened. Output is a line that the worker wrote on stderr; then Text is empty.
	Text, Output string
	// Waiting says that Text is what is waited for; without a text the wait is over.
	Waiting bool
}

// Install is how a user gets the worker that Open starts.
const Install = `pip install "meander-rl[torch]"`

// Bounds of waiting. A call is lost after patienceFactor times the slowest call so far, but not before MinPatience.
const (
	MinPatience    = 2 * time.Minute
	patienceFactor = 20
	helloPatience  = 30 * time.Second // hello answers at once
	pollEvery      = 300 * time.Millisecond
	redialMost     = 5 * time.Second
	// compilePatience is the least patience with a worker that compiles: it does so again for the first adapters.
	compilePatience = 20 * time.Minute
	hangingShare    = 4 // of the patience: after a quarter of it a call without an answer is said to hang
)

// Until a started worker listens, and while it loads, it is given readyPatience for each answer: imports may hold it
// up. What is waited for is told after tellFirst and then each tellEvery. Tests set them.
var (
	readyPatience = 5 * time.Minute
	tellFirst     = 3 * time.Second
	tellEvery     = 10 * time.Second
)

// A worker that was lost is looked for at once; one that is lost again before it has computed anything after
// retryFirst, then after twice that, and so on up to retryMost. Tests set them.
var (
	retryFirst = time.Second
	retryMost  = 8 * time.Second
)

// Check joins what is wrong with the settings, by their names on the command line.
func (c Config) Check() error {
	var errs []error
	if c.Address != "" {
		if _, _, _, err := c.parseAddress(); err != nil {
			errs = append(errs, err)
		}
		for _, beside := range []struct {
			name  string
			given bool
		}{
			{"device", c.Device != "" && c.Device != "auto"},
			{"dtype", c.DType != "" && c.DType != "auto"},
			{"threads", c.Threads != 0},
			{"compile", c.Compile},
			{"vae_tiling", c.VAETiling},
			{"generic", c.Generic},
			{"trust_class", c.TrustClass},
			{"family", c.Family != ""},
			{"network", c.Network != ""},
			{"text_encoder_device", c.TextEncoderDevice != ""},
		} {
			if beside.given {
				errs = append(errs, fmt.Errorf("%s: set; must be absent beside torch=%s: give it to the worker",
					beside.name, c.Address))
			}
		}
	}
	if c.Compile && c.Deterministic {
		errs = append(errs, errors.New("compile: set; must be absent beside deterministic: compiled kernels depend on "+
			"what ran before"))
	}
	if c.Generic && c.Family != "" {
		errs = append(errs, errors.New(
			"generic: set; must be absent beside family, whose class says how it is computed"))
	}
	if c.Network != "" && c.Network != "diffusers" && c.Network != "vllm-omni" {
		errs = append(errs, fmt.Errorf("network: %q; must be diffusers or vllm-omni", c.Network))
	}
	if file, name, _ := strings.Cut(c.Family, ".py:"); c.Family != "" && (file == "" || name == "") {
		errs = append(errs, fmt.Errorf("family: %q; must be FILE.py:NAME, such as my_model.py:MyModel", c.Family))
	}
	switch c.DType {
	case "", "auto", "f32", "bf16", "f16":
	default:
		errs = append(errs, fmt.Errorf("dtype: %q; must be auto, f32, bf16 or f16", c.DType))
	}
	if !isDevice(c.TextEncoderDevice) {
		errs = append(errs, fmt.Errorf("text_encoder_device: %q; must be one device, such as cpu or cuda:1",
			c.TextEncoderDevice))
	}
	if !isDevice(c.Device) {
		errs = append(errs, fmt.Errorf("device: %q; must be auto or one device, such as cpu, cuda:0 or mps", c.Device))
	}
	return errors.Join(errs...)
}

// isDevice says whether a name can be that of one device, or is empty.
func isDevice(name string) bool {
	return !strings.HasPrefix(name, "-") && !strings.ContainsAny(name, " ,\x00")
}

// parseAddress splits Address into network and address, as of package net, and whether TLS is spoken.
func (c Config) parseAddress() (network, address string, tls bool, err error) {
	if path, ok := strings.CutPrefix(c.Address, "unix:"); ok {
		if !filepath.IsAbs(path) {
			return "", "", false,
				fmt.Errorf("engine: torch=%s; the path must be absolute, as in torch=unix:/run/torch.sock", c.Address)
		}
		return "unix", path, false, nil
	}
	address, tls = strings.CutPrefix(c.Address, "tls:")
	host, port, err := net.SplitHostPort(address)
	if n, bad := strconv.Atoi(port); err != nil || host == "" || bad != nil || n < 1 || n > 65535 {
		return "", "", false, fmt.Errorf("engine: torch=%s; must be unix:/PATH, HOST:PORT or tls:HOST:PORT, with a "+
			"port from 1 to 65535", c.Address)
	}
	return "tcp", address, tls, nil
}

// tell tells what is waited for, after a while and then regularly, until stop is called.
func (c Config) tell(what func() string) (stop func()) {
	begun, ended := time.Now(), make(chan struct{})
	var telling sync.WaitGroup
	telling.Go(func() {
		told := false
		for wait := tellFirst; ; wait = tellEvery {
			select {
			case <-time.After(wait):
				told = true
				c.log(Event{Waiting: true, Text: fmt.Sprintf("waiting for the torch worker since %v: %s",
					time.Since(begun).Round(time.Second), what())})
			case <-ended:
				if told {
					c.log(Event{Waiting: true})
				}
				return
			}
		}
	})
	return func() {
		close(ended)
		telling.Wait()
	}
}

func (c Config) log(e Event) {
	if c.Log != nil {
		c.Log(e)
	}
}
