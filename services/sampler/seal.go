package sampler

import (
	"context"
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

// A seal says that a sampler of this event plane made a step, for this very request, with this
// program and such a device, and made or took over all steps before it, each with its seal. What
// anybody else puts on the subjects of steps has none, and neither has a step of another
// request, another order, or with another state in it: the code is over the one before it,
// the step's content digest, which names the weights, and the digest of its checkpoint.
type seal [sha256.Size]byte

func (s seal) String() string { return hex.EncodeToString(s[:]) }

// sealer makes the seals of one sampler.
type sealer struct {
	key   []byte
	build string    // what bits depend on besides the request and the device
	codes sync.Pool // of hash.Hash, which know the key
}

func (s *service) newSealer(ctx context.Context) (*sealer, error) {
	key, err := s.bus.SealKey(ctx)
	if err != nil {
		return nil, err
	}
	return &sealer{key: key, build: program()}, nil
}

// program is the SHA-256 of the program that runs. One that cannot be read is like no other.
var program = sync.OnceValue(func() string {
	h := sha256.New()
	err := func() error {
		path, err := os.Executable()
		if err != nil {
			return err
		}
		if _, err := os.Stat("/proc/self/exe"); err == nil {
			path = "/proc/self/exe" // also when a newer one has taken its place
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

// alike is a backend by what bits depend on: a CPU's do not depend on its instructions.
func alike(backend string) string {
	if kind, _, _ := strings.Cut(backend, "/"); kind == "cpu" {
		return kind
	}
	return backend
}

// first is what the seal of the first step is made over, in the place of one before it: the
// request, the state of another sample that it begins with, nil for none, and what computes.
func (s *sealer) first(r *schemas.Request, parent *schemas.Tensor, backend string) (seal, error) {
	q := *r
	q.Priority = 0 // a request may be asked again with another
	data, err := schemas.Encode(&q)
	if err != nil {
		return seal{}, fmt.Errorf("seal: %w", err)
	}
	request, state := sha256.Sum256(data), [sha256.Size]byte{}
	if parent != nil {
		state = sha256.Sum256(parent.Data)
	}
	return s.sum([]byte("meander seal 1"), request[:], state[:], []byte(s.build+" "+alike(backend))), nil
}

// next is the seal of a step, or of tokens, whose content digest and tensors' digests are given, after the one before it.
func (s *sealer) next(before seal, content [sha256.Size]byte, e schemas.StepEvent, sums schemas.TensorSums) seal {
	state := ""
	if step, ok := e.(*schemas.Step); ok && step.Checkpoint != nil {
		c := step.Checkpoint
		state = fmt.Sprintf("%x %s %d", step.CheckpointSum(sums), c.DType, c.Shape)
	}
	return s.sum(before[:], content[:], []byte(state))
}

func (s *sealer) sum(parts ...[]byte) (sum seal) {
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
