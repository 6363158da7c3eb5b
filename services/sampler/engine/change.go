package engine

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
)

// Change is what a policy changes in its checkpoint: adapters, or the whole transformer, which Digest names.
type Change struct {
	Adapters []lora.Weighted
	Full     *lora.Full
	Digest   string
}

// Empty reports whether the change leaves the checkpoint as it is.
func (c Change) Empty() bool { return c.Full == nil && len(c.Adapters) == 0 }

// Refusal says that a policy can never be loaded: trying again, or another sampler, does not help.
type Refusal struct{ err error }

func (e *Refusal) Error() string { return e.err.Error() }
func (e *Refusal) Unwrap() error { return e.err }

// Refuse returns a *Refusal.
func Refuse(format string, args ...any) error { return &Refusal{fmt.Errorf(format, args...)} }

// Refused reports whether an error is a *Refusal.
func Refused(err error) bool {
	_, ok := errors.AsType[*Refusal](err)
	return ok
}

// refused makes an error of weights a *Refusal, unless it says that the device is lost, or away. nil stays nil.
func refused(err error) error {
	if err != nil && !errors.Is(err, tensor.ErrDeviceLost) && !errors.Is(err, model.ErrAway) {
		return &Refusal{err}
	}
	return err
}

// Changed returns model m of network n with a change; same: it is m. A *Refusal says that the model cannot have it.
func Changed[M any](m M, n Network, c Change) (_ M, same bool, err error) {
	a, ok := any(m).(lora.Adaptable[M])
	switch {
	case !ok && c.Full != nil:
		return m, false, Refuse("weights: the model %s takes none", n.Name())
	case !ok && !c.Empty():
		return m, false, Refuse("adapter: the model %s takes none", n.Name())
	case c.Full != nil:
		if err = a.Tensors().Check(c.Full); err == nil {
			m, err = a.Replaced(c.Full, c.Digest)
		}
		return m, false, refused(err)
	case !ok, n.Digest() == lora.WeightsDigest(a.BaseDigest(), c.Adapters...):
		return m, true, nil
	}
	m, err = a.Adapted(c.Adapters...)
	return m, false, refused(err)
}

// Can returns what adapters and full weights can change in m.
func Can[M any](m M) (modules lora.Table, tensors lora.Shapes) {
	if a, ok := any(m).(lora.Adaptable[M]); ok {
		return a.Modules(), a.Tensors()
	}
	return nil, nil
}

// Base returns the digest of the checkpoint of m, else that of its weights.
func Base[M any](m M, digest string) string {
	if a, ok := any(m).(lora.Adaptable[M]); ok {
		return a.BaseDigest()
	}
	return digest
}

// MixOf tells whose rows may be in one call with those of model m: engines of equal values. alone is that of an engine
// whose model does not mix.
func MixOf(m, alone any) any {
	if mixer, ok := m.(lora.Mixer); ok {
		return mixer.Mix()
	}
	return alone
}

// CanarySeed chooses the fixed input of canaries.
const CanarySeed = 7

// Canary evaluates weights at a fixed input and returns digest and length of the result, by which a sampler sees
// whether new weights change anything. A panic or a value that is not finite is a *Refusal.
func Canary(what string, evaluate func() ([]float32, error)) (*schemas.Canary, error) {
	var x []float32
	err := Guarded(func() (err error) {
		x, err = evaluate()
		return err
	})
	if bus.Code(err) == schemas.CodePanic {
		return nil, Refuse("canary: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("canary: %w", err)
	}
	sum := 0.0
	for _, e := range x {
		sum += float64(float64(e) * float64(e))
	}
	if sum-sum != 0 {
		return nil, Refuse("canary: the %s at a fixed input is not finite", what)
	}
	digest := sha256.Sum256(tensor.F32.AppendFloats(nil, x))
	return &schemas.Canary{Digest: hex.EncodeToString(digest[:]), Norm: math.Sqrt(sum)}, nil
}
