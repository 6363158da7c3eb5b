package teacher

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
)

// scoreSample computes what a request asks of a stored sample. An error is a refusal, or may pass.
func (s *service) scoreSample(
	network engine.Network, t *schemas.Trajectory, r *schemas.TeacherRequest,
) (*schemas.TeacherReply, error) {
	if t.StopReason != schemas.StopCompleted {
		return nil, refuse(schemas.CodeUnfit, "it did not complete: %s %s", t.StopReason, t.Error)
	}
	switch n := network.(type) {
	case *texts.Network:
		switch {
		case t.Text == nil:
			return nil, refuse(schemas.CodeUnfit, "it is an image; the teacher's model %s makes texts", n.Name())
		case r.Substeps > 0:
			return nil, refuse(schemas.CodeInvalid, "substeps: %d; must be absent, texts have no steps", r.Substeps)
		}
		return s.scoreText(n.Model, t, int(r.TopK))
	case *images.Network:
		switch {
		case t.Text != nil:
			return nil, refuse(schemas.CodeUnfit, "it is a text; the teacher's model %s makes images", n.Name())
		case r.TopK > 0:
			return nil, refuse(schemas.CodeInvalid, "top_k: %d; must be absent, images have no tokens", r.TopK)
		}
		return s.scoreImage(n.Model, t, int(r.Substeps))
	}
	return nil, refuse(schemas.CodeUnfit, "the teacher's model %s scores no samples that are given", network.Name())
}

// maxTop bounds the bytes of the likeliest tokens of one reply.
const maxTop = 64 << 20

// scoreText computes the numbers of each token that was generated, from the tokens before it.
func (s *service) scoreText(m lm.Model, t *schemas.Trajectory, topK int) (*schemas.TeacherReply, error) {
	card, settings := m.Card(), &t.Text.Settings
	stored := new(*t.Text.IDs)
	if err := s.bus.LoadTensors(s.ctx, stored); err != nil {
		return nil, gone(fmt.Errorf("text.ids: %w: removed by age or by hand", err))
	}
	ids, err := texts.IDsOf(stored, card.Vocabulary)
	if err != nil {
		return nil, refuse(schemas.CodeUnfit,
			"%w, the vocabulary of the teacher's model %s: they must share a tokenizer", err, card.Name)
	}
	n, k := len(ids), min(topK, card.Vocabulary)
	switch {
	case n > card.MaxPositions:
		return nil, refuse(schemas.CodeUnfit, "it has %d tokens, the context of the teacher's model %s %d", n,
			card.Name, card.MaxPositions)
	case 8*n*k > maxTop:
		return nil, refuse(schemas.CodeInvalid, "top_k: %d; must be at most %d for %d tokens", topK, maxTop/(8*n), n)
	}
	if err := checkTokenizer(m, t.Text, ids); err != nil {
		return nil, err
	}
	numbers := make([][]float32, 4) // log_probs, processed_log_probs, log_sum_exps, entropies
	for i := range numbers {
		numbers[i] = make([]float32, n)
	}
	topIDs, topLogits := make([]int32, n*k), make([]float32, n*k)
	given := texts.NewGiven(m, ids)
	defer given.Close()
	var d decoding.Distribution
	var by *schemas.Engine // that drew the tokens
	if drawn := t.Drawn; drawn != nil {
		by = &drawn.Engine
	}
	params := texts.ParamsOf(settings, by)
	for _, turn := range t.Text.Turns {
		for at := int(turn.Begin); turn.Generated && at < int(turn.End); at++ {
			logits, err := given.Logits(s.ctx, at)
			if err != nil {
				return nil, err
			}
			if err := d.Reset(logits, params); err != nil {
				return nil, refuse(schemas.CodeFailed, "token %d: %w", at, err)
			}
			c := d.At(ids[at])
			numbers[0][at], numbers[1][at], numbers[2][at], numbers[3][at] = c.LogProb, c.Processed, c.LSE, c.Entropy
			for j, id := range decoding.Top(logits, k) {
				topIDs[at*k+j], topLogits[at*k+j] = id, logits[id]
			}
		}
	}
	reply := &schemas.TeacherReply{}
	for i, field := range []**schemas.Tensor{
		&reply.LogProbs, &reply.ProcessedLogProbs, &reply.LogSumExps, &reply.Entropies,
	} {
		if *field, err = s.tensor("F32", tensor.F32.AppendFloats(nil, numbers[i]), n); err != nil {
			return nil, err
		}
	}
	if k == 0 {
		return reply, nil
	}
	data := make([]byte, 0, 4*len(topIDs))
	for _, id := range topIDs {
		data = binary.LittleEndian.AppendUint32(data, uint32(id))
	}
	if reply.TopIDs, err = s.tensor("I32", data, n, k); err != nil {
		return nil, err
	}
	reply.TopLogits, err = s.tensor("F32", tensor.F32.AppendFloats(nil, topLogits), n, k)
	return reply, err
}

// checkTokenizer refuses a sample whose answers the model's tokenizer reads as other texts than they say: its ids mean
// something else there. What ended an answer is not part of its text.
func checkTokenizer(l lm.Language, of *schemas.TextResult, ids []int32) error {
	for i, turn := range of.Turns {
		if !turn.Generated {
			continue
		}
		if got := lm.Text(l, ids[turn.Begin:turn.End]); !strings.HasPrefix(got, turn.Text) {
			return refuse(schemas.CodeUnfit,
				"turns[%d]: it says %.40q, which the tokenizer of the teacher's model %s reads "+
					"as %.40q: they must share a tokenizer", i, turn.Text, l.Card().Name, got)
		}
	}
	return nil
}

// inlineBytes is the size from which on a tensor of a reply goes to the object store.
const inlineBytes = 16 << 10

// tensor returns a tensor of a reply: large ones are stored as blobs.
func (s *service) tensor(dtype string, data []byte, shape ...int) (*schemas.Tensor, error) {
	t := &schemas.Tensor{DType: dtype}
	for _, n := range shape {
		t.Shape = append(t.Shape, int64(n))
	}
	if len(data) < inlineBytes {
		t.Data = data
		return t, nil
	}
	ref, err := s.bus.PutBlob(s.ctx, data)
	if err != nil {
		return nil, fmt.Errorf("store a tensor of the reply: %w", err)
	}
	t.Ref = &ref
	return t, nil
}

// scoreImage computes the log-prob of each stochastic step whose states before and after are stored, from the model's
// velocity at the state before, or from the mean one of so many steps inside it.
func (s *service) scoreImage(m model.Model, t *schemas.Trajectory, substeps int) (*schemas.TeacherReply, error) {
	card := m.Card()
	if t.ScheduledSampling != nil {
		return nil, refuse(schemas.CodeUnfit, "it is of scheduled sampling, whose steps have no log-probs")
	}
	if err := cmp.Or(
		images.CheckLatents(card, t), images.CheckSettings(card, &t.Sampling), checkSubsteps(card, t, substeps),
	); err != nil {
		return nil, refuse(schemas.CodeUnfit, "the teacher's model %s: %w", card.Name, err)
	}
	conds, err := images.Encode(s.ctx, m, &t.Sampling, s.files)
	if errors.Is(err, model.ErrPrompt) {
		return nil, refuse(schemas.CodeUnfit, "encode the prompt: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("encode the prompt: %w", err)
	}
	given := images.Given{Velocities: images.NewVelocities(m), Sampling: &t.Sampling, Conditionings: conds}
	plan, reply := sampling.Plan(&t.Sampling), &schemas.TeacherReply{LogProbKind: t.LogProbKind}
	plan.Tracks = schemas.TrackElements(t.Tracks)
	var velocities []byte
	states := map[int][]float32{} // the last ones
	for i := plan.Begin; i < plan.End; i++ {
		if t.LogProbs[i] == nil {
			continue // an ode step
		}
		for k := range states {
			if k < i {
				delete(states, k)
			}
		}
		for k := i; k <= i+1; k++ {
			if states[k] == nil {
				if states[k], err = s.loadState(t, k); err != nil {
					return nil, err
				}
			}
		}
		if states[i] == nil || states[i+1] == nil {
			reply.StepsLeftOut = append(reply.StepsLeftOut, int64(i))
			continue
		}
		v, err := s.velocity(given, plan, i, states[i], substeps)
		if err != nil {
			return nil, err
		}
		p, err := flow.Score(plan, i, states[i], v, states[i+1])
		if err != nil {
			return nil, refuse(schemas.CodeFailed, "step %d: %w", i, err)
		}
		reply.StepIndices, reply.StepLogProbs = append(reply.StepIndices, int64(i)), append(reply.StepLogProbs, p.Mean)
		if substeps > 0 {
			velocities = tensor.F32.AppendFloats(velocities, v)
		}
	}
	switch {
	case velocities != nil:
		reply.Velocities, err = s.tensor("F32", velocities, len(reply.StepIndices), int(t.LatentsShape[0]),
			int(t.LatentsShape[1]))
		return reply, err
	case len(reply.StepIndices) > 0:
		return reply, nil
	case len(reply.StepsLeftOut) > 0:
		return nil, refuse(schemas.CodeUnfit, "no step has both its states: keep them with return_step_indices")
	}
	return nil, refuse(schemas.CodeUnfit, "no step is stochastic, so there are no log-probs")
}

// checkSubsteps refuses sigmas between those of the schedule where the network has none: it takes a timestep of its own
// for each, or a whole pipeline computes it, whose scheduler knows its own alone.
func checkSubsteps(card model.Card, t *schemas.Trajectory, substeps int) error {
	if substeps > 1 && (len(t.Sampling.NetworkTimesteps) > 0 || card.Pipeline != nil) {
		return fmt.Errorf("substeps: %d; must be 1: the model is evaluated at the sigmas of its own schedule alone",
			substeps)
	}
	return nil
}

// velocity returns the model's velocity at the state x before a step, or the mean one of so many steps of the sample's
// solver from there to the step's end: the one that an ode step of euler goes as far with.
func (s *service) velocity(given images.Given, plan flow.Plan, step int, x []float32, substeps int) ([]float32, error) {
	at := func(x []float32, sigma float32) ([]float32, error) {
		return given.Velocity(s.ctx, images.Point{Step: int64(step), X: x, Sigma: sigma})
	}
	if substeps <= 1 {
		return at(x, plan.Sigmas[step])
	}
	rollout, err := flow.NewRollout(plan.Within(step, substeps), x)
	if err != nil {
		return nil, refuse(schemas.CodeUnfit, "substeps: %d: step %d: %w", substeps, step, err)
	}
	for !rollout.Done() {
		v, err := at(rollout.Point())
		if err != nil {
			return nil, err
		}
		if _, err := rollout.Advance(v); err != nil {
			return nil, refuse(schemas.CodeFailed, "step %d, of the teacher: %w", step, err)
		}
	}
	v, length := make([]float32, len(x)), float64(plan.Sigmas[step+1])-float64(plan.Sigmas[step])
	for i, end := range rollout.Latents() {
		v[i] = float32((float64(end) - float64(x[i])) / length)
	}
	return v, nil
}

// loadState returns a stored state [S, C] of a sample; nil if it was never kept. One that is gone is a refusal.
func (s *service) loadState(t *schemas.Trajectory, index int) ([]float32, error) {
	state, err := s.bus.LoadState(s.ctx, t, int64(index))
	switch {
	case errors.Is(err, bus.ErrNotFound) && !slices.Contains(t.LatentStepIndices, int64(index)):
		return nil, nil
	case err != nil:
		return nil, gone(err)
	}
	x := make([]float32, t.LatentsShape[0]*t.LatentsShape[1])
	if err := tensor.DType(state.DType).DecodeFloats(x, state.Data); err != nil {
		return nil, refuse(schemas.CodeGone, "state %d: %w", index, err)
	}
	return x, nil
}
