package bus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

const (
	// partType is the header Mdr-Type of a part: a part is not an event but some bytes of one.
	partType = "part/1"
	// stepOverhead is an upper bound for the bytes of a step without its tensors' elements, tokenOverhead for what
	// each token adds.
	stepOverhead  = 4 << 10
	tokenOverhead = 32
)

// overhead returns an upper bound for the bytes of an event without its tensors' elements.
func overhead(e schemas.StepEvent) int {
	if t, ok := e.(*schemas.Tokens); ok {
		return stepOverhead + tokenOverhead*len(t.IDs)
	}
	return stepOverhead
}

// InlineSize returns the bytes of the tensors that are inside the event.
func InlineSize(e schemas.StepEvent) int {
	n := 0
	for _, t := range e.Tensors() {
		n += len(t.Data)
	}
	return n
}

// SplitParts moves tensors out of an event that is too large for one message, largest first, until it encodes to at
// most limit bytes; PublishStep publishes the parts as messages of their own. It returns the moved bytes in the order
// of the part numbers; an event that fits has no parts. Each part has at most schemas.MaxPartBytes (and at most
// limit) bytes and aliases its tensor. SplitParts replaces the tensors of e (see schemas.StepEvent.Detached) and does
// not modify their elements. sums are the digests of the tensors of e.
func SplitParts(e schemas.StepEvent, sums *schemas.TensorSums, limit int) [][]byte {
	size := InlineSize(e)
	if size <= limit-overhead(e) {
		return nil
	}
	var parts [][]byte
	chunk := max(1, min(schemas.MaxPartBytes, limit))
	ts := e.Tensors()
	order := make([]int, len(ts))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return len(ts[b].Data) - len(ts[a].Data) })
	for _, i := range order {
		t := ts[i]
		if size <= limit-overhead(e) || len(t.Data) == 0 {
			break
		}
		size -= len(t.Data)
		p := &schemas.Parts{First: int64(len(parts)), Size: int64(len(t.Data)), Digest: sums.Text(i)}
		for part := range slices.Chunk(t.Data, chunk) {
			parts = append(parts, part)
		}
		p.Count = int64(len(parts)) - p.First
		t.Data, t.Parts = nil, p
	}
	return parts
}

// JoinParts puts the parts of a large event back into its tensors; part returns the bytes of a part by its number. A
// wrong size or digest is ErrCorrupt; other errors are those of part.
func JoinParts(e schemas.StepEvent, part func(k int64) ([]byte, error)) error {
	for _, t := range e.Tensors() {
		p := t.Parts
		if p == nil {
			continue
		}
		if p.First < 0 || p.Count < 1 || p.First > schemas.MaxParts-p.Count {
			return fmt.Errorf("join parts: %d parts from %d; must be 1 to %d in all", p.Count, p.First,
				schemas.MaxParts)
		}
		if p.Size < 0 || p.Size > schemas.MaxTensorBytes || p.Size > p.Count*schemas.MaxPartBytes {
			return fmt.Errorf("join parts: %d bytes in %d parts; a part has at most %d", p.Size, p.Count,
				schemas.MaxPartBytes)
		}
		// The declared size is not trusted: the buffer grows with what arrives.
		var data bytes.Buffer
		for k := p.First; k < p.First+p.Count; k++ {
			b, err := part(k)
			if err != nil {
				return fmt.Errorf("part %d: %w", k, err)
			}
			if int64(data.Len()+len(b)) > p.Size {
				return fmt.Errorf("part %d: %w: more than the %d bytes declared", k, ErrCorrupt, p.Size)
			}
			data.Write(b)
		}
		if int64(data.Len()) != p.Size || !schemas.HasDigest(data.Bytes(), p.Digest) {
			return fmt.Errorf("parts %d to %d: %w", p.First, p.First+p.Count-1, ErrCorrupt)
		}
		t.Data, t.Parts = data.Bytes(), nil
	}
	return nil
}

// LoadStep decodes and validates a stored step, and fetches its parts and the tensors that are in the object store.
// Tensors that were inside the message alias m.Data.
func (b *Bus) LoadStep(ctx context.Context, m *Message) (*schemas.Step, error) {
	return loadEvent(ctx, b, m, &schemas.Step{})
}

// LoadTokens is LoadStep for tokens. Logits are validated after their parts are joined.
func (b *Bus) LoadTokens(ctx context.Context, m *Message) (*schemas.Tokens, error) {
	e, err := loadEvent(ctx, b, m, &schemas.Tokens{})
	if err == nil && e.Logits != nil {
		err = e.Validate()
	}
	return e, err
}

// loadEvent decodes the message of a step or of tokens into e, joins its parts and fetches its tensors from the
// object store; LoadStep and LoadTokens are made of it. ErrNotFound: a part or tensor is gone. ErrCorrupt: one has
// other bytes.
func loadEvent[E schemas.StepEvent](ctx context.Context, b *Bus, m *Message, e E) (none E, _ error) {
	if schemas.IsPart(m.Subject) {
		return none, fmt.Errorf("load step %q: it is a part of one", m.Subject)
	}
	if err := schemas.DecodeValid(m.Data, e); err != nil {
		return none, fmt.Errorf("load step %q: %w", m.Subject, err)
	}
	err := JoinParts(e, func(k int64) ([]byte, error) {
		part, err := b.Last(ctx, schemas.StreamSteps, schemas.PartSubject(m.Subject, k))
		if err != nil {
			return nil, err
		}
		return part.Data, nil
	})
	if err == nil {
		err = b.LoadTensors(ctx, e.Tensors()...)
	}
	if err != nil {
		return none, fmt.Errorf("load step %q: %w", m.Subject, err)
	}
	return e, nil
}

// LoadTensors fetches the bytes of those of the tensors that are in the object store, and puts them in. ErrNotFound:
// one is gone. ErrCorrupt: one has other bytes.
func (b *Bus) LoadTensors(ctx context.Context, tensors ...*schemas.Tensor) error {
	for _, t := range tensors {
		if t.Ref == nil {
			continue
		}
		if t.Ref.Size > schemas.MaxTensorBytes {
			return Terminal(schemas.CodeInvalid, errors.New("tensor in the object store is too large"))
		}
		data, err := b.GetBlob(ctx, *t.Ref)
		if err != nil {
			return err
		}
		t.Data, t.Ref = data, nil
	}
	return nil
}

// LoadStepRef returns the step that a trajectory names by its sequence, with its tensors, which may be in other
// messages or blobs. It checks the digest (ErrCorrupt) before it decodes the step. ErrNotFound: some of it is gone.
func (b *Bus) LoadStepRef(ctx context.Context, ref schemas.StepRef) (*schemas.Step, error) {
	m, err := b.Get(ctx, schemas.StreamSteps, ref.Seq)
	if err == nil {
		err = checkStepDigest(m, ref)
	}
	if err != nil {
		return nil, err
	}
	return b.LoadStep(ctx, m)
}

// LoadStepOf is LoadStepRef for step i of a trajectory. It asks by the step's subject, so that the server can check
// whether we may read that run.
func (b *Bus) LoadStepOf(ctx context.Context, t *schemas.Trajectory, i int) (*schemas.Step, error) {
	m, err := b.stepOf(ctx, t, i)
	if err != nil {
		return nil, err
	}
	return b.LoadStep(ctx, m)
}

// LoadTokensOf is LoadStepOf for event i of the trajectory of a text.
func (b *Bus) LoadTokensOf(ctx context.Context, t *schemas.Trajectory, i int) (*schemas.Tokens, error) {
	m, err := b.stepOf(ctx, t, i)
	if err != nil {
		return nil, err
	}
	return b.LoadTokens(ctx, m)
}

func (b *Bus) stepOf(ctx context.Context, t *schemas.Trajectory, i int) (*Message, error) {
	m, err := b.Last(ctx, schemas.StreamSteps, t.StepSubject(i))
	if err != nil {
		return nil, whyGone(t, err)
	}
	return m, checkStepDigest(m, t.Steps[i])
}

// whyGone adds to ErrNotFound, the error of a step of a trajectory, why it may be gone.
func whyGone(t *schemas.Trajectory, err error) error {
	if errors.Is(err, ErrNotFound) {
		return fmt.Errorf("%w: %s", err, t.Group.WhyStepsGone())
	}
	return err
}

// checkStepDigest returns ErrCorrupt when a stored step does not have the digest by which a trajectory names it.
func checkStepDigest(m *Message, ref schemas.StepRef) error {
	got, err := schemas.PayloadDigest(m.Data)
	switch {
	case err != nil:
		return fmt.Errorf("load step %q: %w: %w", m.Subject, ErrCorrupt, err)
	case got != ref.Digest:
		return fmt.Errorf("load step %q: %w: stored %s, named %s", m.Subject, ErrCorrupt, got, ref.Digest)
	}
	return nil
}

// BranchTrajectory returns the completed trajectory of the sample that a branch starts from. It returns ErrNotFound
// when there is none, and ErrFailed when the sample failed.
func (b *Bus) BranchTrajectory(ctx context.Context, at schemas.Branch) (*schemas.Trajectory, error) {
	t := &schemas.Trajectory{}
	m, err := b.Last(ctx, schemas.StreamTrajectories,
		schemas.TrajectorySubject(at.Run, at.UID, at.SampleIndex, at.Place().Stage))
	switch {
	case errors.Is(err, ErrNotFound):
		err = ErrNotFound // the text below says what was not found
	case err == nil:
		fault := Fits(m, t)
		switch {
		case fault != nil:
			err = fmt.Errorf("%w: %w", ErrNotFound, fault)
		case t.StopReason != schemas.StopCompleted:
			err = fmt.Errorf("%w: %s", ErrFailed, t.Error)
		default:
			return t, nil
		}
	}
	return nil, fmt.Errorf("sample %v of group %s of run %s: %w", at.Place(), at.UID, at.Run, err)
}

// LoadBranch returns the state that a branch starts from, with the shape of a group's state, [1, S, C]. made is the
// trajectory that the branch names. Errors are those of LoadState.
func (b *Bus) LoadBranch(ctx context.Context, at schemas.Branch, made *schemas.Trajectory) (*schemas.Tensor, error) {
	state, err := b.LoadState(ctx, made, at.StepIndex)
	if err != nil {
		return nil, err
	}
	return &schemas.Tensor{DType: state.DType, Shape: append([]int64{1}, state.Shape...), Data: state.Data}, nil
}

// LoadState returns a stored state of a completed trajectory, [S, C]: index k is the state before step k, the number
// of steps is the final state. The step that holds the state must be the one that the trajectory names (ErrCorrupt).
// It returns ErrNotFound when the state was not stored, or its step is gone.
func (b *Bus) LoadState(ctx context.Context, t *schemas.Trajectory, index int64) (*schemas.Tensor, error) {
	begin, end := t.Segment()
	if at := max(min(index, end-1), begin); index >= begin && index <= end && at-begin < int64(len(t.Steps)) {
		step, err := b.LoadStepRef(ctx, t.Steps[at-begin])
		if err = whyGone(t, err); err != nil {
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w", index, t.SampleIndex, t.UID, err)
		}
		state := step.State(index)
		switch subject := t.StepSubject(int(at - begin)); {
		case step.Subject() != subject || step.ScheduleDigest != t.ScheduleDigest:
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w: its step is %q, the trajectory names %q",
				index, t.SampleIndex, t.UID, ErrCorrupt, step.Subject(), subject)
		case state == nil:
		case state.DType != t.LatentsDType || !slices.Equal(state.Shape, t.LatentsShape):
			return nil, fmt.Errorf("state %d of sample %d of group %s: %w: %s of shape %v, the trajectory has %s of %v",
				index, t.SampleIndex, t.UID, ErrCorrupt, state.DType, state.Shape, t.LatentsDType, t.LatentsShape)
		default:
			return state, nil
		}
	}
	return nil, fmt.Errorf("state %d of sample %d of group %s: %w: kept are %v", index, t.SampleIndex, t.UID,
		ErrNotFound, t.LatentStepIndices)
}
