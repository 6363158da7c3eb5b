package recorder

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/meander-rl/meander/schemas"
)

// A seal is a code over the seal of the step before, the step's content digest (which names the weights) and the
// digest of its checkpoint. The first is made over the request, the program and the kind of device. So a right seal
// says: a sampler of this event plane made this step, for this request, with this program on such a device, and made
// or took over all steps before it. Other users may store messages on the subjects of steps, but cannot seal them.
type seal [sha256.Size]byte

func (s seal) String() string { return hex.EncodeToString(s[:]) }

// Sealer makes the seals of one sampler.
type Sealer struct {
	key   []byte
	build string    // names the program: bits depend on it, the request and the device
	codes sync.Pool // of hash.Hash with the key
}

// NewSealer returns a Sealer with key, the secret of the event plane (bus.SealKey), for steps that this program makes.
func NewSealer(key []byte) *Sealer { return &Sealer{key: key, build: program()} }

// program returns the SHA-256 of the running program. Where the file cannot be read it is random: unlike any other.
var program = sync.OnceValue(func() string {
	h := sha256.New()
	err := func() error {
		path, err := os.Executable()
		if err != nil {
			return err
		}
		if _, err := os.Stat("/proc/self/exe"); err == nil {
			path = "/proc/self/exe" // the running program, also where the file was replaced
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		_, err = io.Copy(h, f)
		return err
	}()
	if err != nil {
		return rand.Text()
	}
	return hex.EncodeToString(h.Sum(nil))
})

// backendClass returns the part of a backend's name that bits depend on: for CPUs the instruction set is left out.
func backendClass(backend string) string {
	if kind, _, _ := strings.Cut(backend, "/"); kind == "cpu" {
		return kind
	}
	return backend
}

// firstSeal returns the start of the chain: a code of the request, of the parent's state that the sample begins with
// (nil for none), and of the program and the device.
func (s *Sealer) firstSeal(r *schemas.Request, parent *schemas.Tensor, backend string) (seal, error) {
	q := *r
	q.Priority = 0 // the same request may come again with another priority
	data, err := schemas.Encode(&q)
	if err != nil {
		return seal{}, fmt.Errorf("seal: %w", err)
	}
	request, state := sha256.Sum256(data), [sha256.Size]byte{}
	if parent != nil {
		state = sha256.Sum256(parent.Data)
	}
	return s.mac([]byte("meander seal 1"), request[:], state[:], []byte(s.build+" "+backendClass(backend))), nil
}

// sealAfter returns the seal of a step by its content digest, the digests of its tensors, and the seal before.
func (s *Sealer) sealAfter(before seal, content [sha256.Size]byte, e schemas.StepEvent, sums *schemas.TensorSums) seal {
	state := ""
	if step, ok := e.(*schemas.Step); ok && step.Checkpoint != nil {
		c := step.Checkpoint
		state = fmt.Sprintf("%x %s %d", step.CheckpointSum(sums), c.DType, c.Shape)
	}
	return s.mac(before[:], content[:], []byte(state))
}

// mac returns the HMAC-SHA256 of the joined parts, the code that seals are.
func (s *Sealer) mac(parts ...[]byte) (sum seal) {
	h, _ := s.codes.Get().(hash.Hash)
	if h == nil {
		h = hmac.New(sha256.New, s.key)
	}
	defer s.codes.Put(h)
	h.Reset()
	for _, p := range parts {
		h.Write(p)
	}
	h.Sum(sum[:0])
	return sum
}
