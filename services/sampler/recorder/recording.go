// Package recorder turns what one attempt at a sample makes into events: it names, seals and publishes each step,
// makes the trajectory at the end, and finds the steps that earlier attempts have stored.
//
// A Recording digests, seals and publishes steps; a Recorder is that of one attempt, a Store what recorders share.
// Seals are codes that only samplers of this event plane can make, each over the one before; Recorder.Resume takes over
// the steps of an earlier attempt whose seals are right. Rolled, of a latent or a sample, means made by scheduled
// sampling: the model stepped a noised latent down to the timestep of training.
//
// For each attempt the sampler calls New, Begin and Resume, then Record for each step, and at the end Finish, Pruned or
// Failed; AwaitStored when the request is put back. Unless a comment says more, an error is of the server, and the
// sample is made again.
package recorder

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

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Recording is the steps of one attempt: each is digested, sealed after the one before, and published. One goroutine
// uses it.
type Recording struct {
	sealer    *Sealer
	publisher *bus.Publisher

	steps   []recorded
	content [][32]byte // content digests of the steps, without that of the last one while it is sent
	seal    seal       // of the step whose content digest is the last
}

// recorded is a step of the sample: one that this attempt publishes, or one that it took over from an earlier attempt.
type recorded struct {
	ref  schemas.StepRef // set for a step that was taken over
	sent *sentStep       // nil for a step that was taken over
}

// sentStep is what becomes of a step, at once or beside the loop that makes steps.
type sentStep struct {
	giveUp  context.CancelFunc // ends the wait for space in the window; nil for one that is sent at once, as done is
	done    chan struct{}      // closed once the fields below are set
	content [32]byte
	seal    seal
	future  *bus.Future
	err     error
}

// NewRecording returns a Recording without steps that seals with key, the secret of the event plane (bus.SealKey).
func NewRecording(key []byte, p *bus.Publisher) *Recording {
	return &Recording{sealer: &Sealer{key: key}, publisher: p}
}

// besideBytes is how large the tensors of a step are at least for it to be sent beside the loop. To hand it to another
// goroutine costs some microseconds, which is as much as to send a small one.
const besideBytes = 16 << 10

// Step takes over a step, or tokens, that has its names already, to seal and publish it. Of a step of an image with
// large tensors that happens while the next one is computed, so that the loop does not wait for digests; Step waits for
// the one before. Tokens are sent when it returns: with full logits a sampler holds those of one event, however many
// samples it makes. e must not change any more. An error is of the server, of ctx, or says that this step, or the one
// before, is not legal.
func (r *Recording) Step(ctx context.Context, e schemas.StepEvent) error {
	if err := r.awaitSent(ctx); err != nil {
		return err
	}
	s, before := &sentStep{}, r.seal
	if _, ok := e.(*schemas.Step); !ok || bus.InlineSize(e) < besideBytes {
		if err := s.publish(ctx, r.sealer, r.publisher, before, e); err != nil {
			return err
		}
		r.steps = append(r.steps, recorded{sent: s})
		r.content, r.seal = append(r.content, s.content), s.seal
		return nil
	}
	r.steps = append(r.steps, recorded{sent: s})
	s.done = make(chan struct{})
	ctx, s.giveUp = context.WithCancel(ctx)
	go func() {
		defer s.giveUp()
		defer close(s.done)
		s.err = engine.Guarded(func() error { return s.publish(ctx, r.sealer, r.publisher, before, e) })
	}()
	return nil
}

// unsent returns the last step until its digest and its seal are taken; nil if there is no such step.
func (r *Recording) unsent() *sentStep {
	if len(r.content) == len(r.steps) {
		return nil
	}
	return r.steps[len(r.steps)-1].sent
}

// awaitSent waits until the last step is published and takes its digest and seal; one that waits for space in the
// window is given up with ctx.
func (r *Recording) awaitSent(ctx context.Context) error {
	s := r.unsent()
	if s == nil {
		return nil
	}
	select {
	case <-s.done:
	case <-ctx.Done():
		s.giveUp()
		<-s.done
	}
	if s.err != nil {
		return s.err
	}
	r.content, r.seal = append(r.content, s.content), s.seal
	return nil
}

// publish digests, seals and publishes a step; before is the seal of the one before it.
func (s *sentStep) publish(
	ctx context.Context, sealer *Sealer, publisher *bus.Publisher, before seal, e schemas.StepEvent,
) error {
	sums, err := schemas.SumTensors(e)
	if err != nil {
		return fmt.Errorf("digest of step %d: %w", e.Place(), err)
	}
	s.content = schemas.ContentDigestOf(e, sums)
	s.seal = sealer.sealAfter(before, s.content, e, sums)
	e.Sealed(s.seal.String())
	if s.future, err = publisher.PublishStep(ctx, e, sums); err != nil {
		return fmt.Errorf("publish step %d: %w", e.Place(), err)
	}
	return nil
}

// Close gives up the last step if it still waits for space in the window, and waits until it is given up or published.
func (r *Recording) Close() {
	if s := r.unsent(); s != nil {
		s.giveUp()
		<-s.done
	}
}

// Stored waits until every step is stored, and returns where; an error: the sample must be made again.
func (r *Recording) Stored(ctx context.Context) ([]schemas.StepRef, error) {
	if err := r.awaitSent(ctx); err != nil {
		return nil, err
	}
	var refs []schemas.StepRef
	for i, step := range r.steps {
		if step.sent != nil {
			ack, err := step.sent.future.Wait(ctx)
			if err != nil {
				return nil, fmt.Errorf("store step %d of %d: %w", i+1, len(r.steps), err)
			}
			step.ref = schemas.StepRef{Seq: ack.Seq, Digest: ack.Digest}
		}
		refs = append(refs, step.ref)
	}
	return refs, nil
}

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
