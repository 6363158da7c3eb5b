package export

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// Record is what all formats say of a sample, in JSON or as columns.
type Record struct {
	Run         string `json:"run" parquet:"run"`
	UID         string `json:"uid" parquet:"uid"`
	SampleIndex int64  `json:"sample_index" parquet:"sample_index"`
	// Stage is there for samples of several stages, each of which has a record: one, where Samples samples share it,
	// those from SampleIndex on. Reward is then their mean, Advantage that of the stage: null of a stage that is not
	// trained, or whose tracks have their own.
	Stage   string `json:"stage,omitempty" parquet:"stage"`
	Samples int64  `json:"samples,omitempty" parquet:"samples"`
	Lane    string `json:"lane" parquet:"lane"`
	Prompt  string `json:"prompt" parquet:"prompt"`
	// GroupStatus is that of the group's result: only complete and partial have advantages.
	GroupStatus string   `json:"group_status" parquet:"group_status"`
	Status      string   `json:"status" parquet:"status"` // scored, or failed
	Reward      *float64 `json:"reward" parquet:"reward,optional"`
	Advantage   *float64 `json:"advantage" parquet:"advantage,optional"`
	// StepAdvantages are there where they differ over the trained steps, or tokens; Advantage is then their mean.
	StepAdvantages []float64 `json:"step_advantages,omitempty" parquet:"step_advantages,list"`
	Scores         []Score   `json:"scores" parquet:"scores,list"`
	// Validation marks samples that were made to measure, not to train on. Metadata is the prompt's, JSON.
	Validation bool   `json:"validation" parquet:"validation"`
	Metadata   string `json:"metadata,omitempty" parquet:"metadata"`
	// PolicyVersionMin and PolicyVersionMax are the oldest and newest weights that made the sample.
	PolicyVersionMin int64  `json:"policy_version_min" parquet:"policy_version_min"`
	PolicyVersionMax int64  `json:"policy_version_max" parquet:"policy_version_max"`
	WeightsDigest    string `json:"weights_digest" parquet:"weights_digest"`
	ContentDigest    string `json:"content_digest" parquet:"content_digest"`
	SampleSeed       uint64 `json:"sample_seed,string" parquet:"sample_seed"`

	// Parent is the sample whose stored state this one began with, at Parent.StepIndex: the steps before, and their
	// states, are in the parent's record.
	Parent *Parent `json:"parent,omitempty" parquet:"parent,optional"`
	// Path is there for leaves of a tree: whose steps led to this one, from the root, a part for each branch point.
	Path []Part `json:"path,omitempty" parquet:"path,list"`

	// Of images and videos. Settings are all that decided the rollout (schemas.Sampling), JSON; CFGScales [T] are the
	// scales of guidance that come of them, absent: 1.
	Settings  string     `json:"settings,omitempty" parquet:"settings"`
	CFGScales []float64  `json:"cfg_scales,omitempty" parquet:"cfg_scales,list"`
	LogProbs  []*float64 `json:"log_probs,omitempty" parquet:"log_probs,list"`
	// LatentIndices [K] are the indices of the stored states: i is before step i. LatentsShape is [K, S, C].
	LatentIndices []int64 `json:"latent_indices,omitempty" parquet:"latent_indices,list"`
	LatentsShape  []int64 `json:"latents_shape,omitempty" parquet:"latents_shape,list"`

	// Of texts. Messages and Turns, what was said in answer to what, are JSON. IDs [n] are the whole sequence, Mask is
	// 1 for generated tokens; TokenLogProbs are before temperature and filters, ProcessedLogProbs after them, both 0
	// for given tokens.
	Messages          string       `json:"messages,omitempty" parquet:"messages"`
	Turns             string       `json:"turns,omitempty" parquet:"turns"`
	Answer            string       `json:"answer,omitempty" parquet:"answer"`
	FinishReason      string       `json:"finish_reason,omitempty" parquet:"finish_reason"`
	Temperature       float64      `json:"temperature,omitempty" parquet:"temperature"`
	IDs               []int32      `json:"ids,omitempty" parquet:"ids,list"`
	Mask              []int32      `json:"mask,omitempty" parquet:"mask,list"`
	TokenLogProbs     view.Numbers `json:"token_log_probs,omitempty" parquet:"token_log_probs,list"`
	ProcessedLogProbs view.Numbers `json:"processed_log_probs,omitempty" parquet:"processed_log_probs,list"`
}

// Score is what one reward function gave.
type Score struct {
	Name  string   `json:"name" parquet:"name"`
	Value *float64 `json:"value" parquet:"value,optional"`
	// Members is how many samples of the group the function compared: the score depends on them. 0: on this one alone.
	Members int64 `json:"members,omitempty" parquet:"members"`
}

// Parent names a state that a sample stored: the one before a step.
type Parent struct {
	Run         string `json:"run" parquet:"run"`
	UID         string `json:"uid" parquet:"uid"`
	SampleIndex int64  `json:"sample_index" parquet:"sample_index"`
	Stage       string `json:"stage,omitempty" parquet:"stage,optional"`
	StepIndex   int64  `json:"step_index" parquet:"step_index"`
}

// Part is the steps of a path from StepIndex to the next part: SampleIndex took them. Leaves scored samples have them
// on their paths. Advantage is that of these steps; null of the root, which is compared with nothing.
type Part struct {
	SampleIndex int64    `json:"sample_index" parquet:"sample_index"`
	StepIndex   int64    `json:"step_index" parquet:"step_index"`
	Leaves      int64    `json:"leaves" parquet:"leaves"`
	Advantage   *float64 `json:"advantage" parquet:"advantage,optional"`
}

// pathOf returns the path of a leaf; nil without a tree.
func pathOf(a *schemas.Advantage, tree *schemas.Tree, leaf int64) []Part {
	if tree == nil {
		return nil
	}
	root := Part{}
	for _, m := range a.Members {
		if m.Status == schemas.StatusScored {
			root.Leaves++
		}
	}
	path := []Part{root}
	for i, at := range tree.Branches {
		part := Part{SampleIndex: tree.SampleOf(leaf, i+1), StepIndex: at.StepIndex}
		for _, b := range a.Branches {
			for _, c := range b.Children {
				if b.StepIndex == part.StepIndex && c.SampleIndex == part.SampleIndex {
					part.Leaves, part.Advantage = c.Leaves, c.Advantage
				}
			}
		}
		path = append(path, part)
	}
	return path
}

// sample is a sample with its files.
type sample struct {
	Record
	of         *schemas.Trajectory
	media      map[string][]byte // the files by their kind
	mp4        []byte            // of the video; nil: none
	latents    []float32         // [K, S, C]
	conditions []conditionFile
}

// conditionFile is what the network was given beside the prompt, a PNG. Several of one name are numbered: NAME.1 is the
// second one.
type conditionFile struct {
	Name  string `parquet:"name"`
	Type  string `parquet:"type"`
	Bytes []byte `parquet:"bytes"`
}

// readConditions reads the files of a sample's conditions.
func readConditions(
	ctx context.Context, c *client.Client, list []schemas.Condition,
) (files []conditionFile, err error) {
	seen := map[string]int{}
	for _, of := range list {
		data, err := c.Condition(ctx, of)
		if err != nil {
			return nil, fmt.Errorf("condition %s: %w", of.Name, err)
		}
		name := of.Name
		if n := seen[of.Name]; n > 0 {
			name = fmt.Sprintf("%s.%d", name, n)
		}
		seen[of.Name]++
		files = append(files, conditionFile{name, of.Type, data})
	}
	return files, nil
}

// key names the sample in a file. A uid has no "/" and no ".".
func (s *sample) key() string {
	key := fmt.Sprintf("%s_%06d", s.UID, s.SampleIndex)
	if s.Stage != "" {
		key += "_" + s.Stage
	}
	return key
}

// eachSample calls do with the samples of a closed group, or with their stages, one after the other. leftOut are those
// that did not complete, and those of which something is no longer stored or not what it should be.
func eachSample(ctx context.Context, b *bus.Bus, a *schemas.Advantage, latents bool,
	do func(*sample) error,
) (leftOut int, err error) {
	stored := view.Made{}
	for t, err := range view.Trajectories(ctx, b, cmp.Or(a.SourceRun, a.Run), a.UID) {
		if err != nil {
			return 0, err
		}
		stored.Add(t.Trajectory)
	}
	rewards, err := view.Rewards(ctx, b, a.Run, a.UID)
	if err != nil {
		return 0, err
	}
	for _, m := range a.Members {
		made, _ := stored.Of(a.UID, m.SampleIndex)
		if len(made) == 0 {
			leftOut++
		}
		for _, t := range made {
			if t.SampleIndex != m.SampleIndex {
				continue // an earlier sample has it
			}
			if t.StopReason != schemas.StopCompleted {
				leftOut++
				continue
			}
			member := view.MemberOf(&m, t, rewards[view.Key{UID: a.UID, Index: m.SampleIndex}])
			if len(t.Group.Stages) > 0 {
				asStage(&member, a)
			}
			s, err := newSample(ctx, b, a, &member, latents)
			if err == nil {
				err = do(s)
			}
			switch {
			case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt), errors.Is(err, errUnreadable):
				leftOut++
			case err != nil:
				return 0, fmt.Errorf("sample %v: %w", t.Place(), err)
			}
		}
	}
	return leftOut, nil
}

// asStage gives a stage of a sample what is the stage's: its advantage, and of several samples the mean reward.
func asStage(m *view.Member, a *schemas.Advantage) {
	l := view.StageOf(m.Trajectory(), a)
	m.Advantage, m.StepAdvantages = nil, nil
	if len(l.Advantages) == 1 && l.Advantages[0].Track == "" {
		m.Advantage, m.StepAdvantages = &l.Advantages[0].Value, l.Advantages[0].Steps
	}
	if l.Samples == 1 {
		return
	}
	m.Reward, m.Scores = nil, nil
	sum, n := 0.0, 0.0
	for _, of := range a.Members {
		if of.Reward != nil && of.SampleIndex >= l.SampleIndex && of.SampleIndex < l.SampleIndex+l.Samples {
			sum, n = sum+*of.Reward, n+1
		}
	}
	if n > 0 {
		m.Reward = new(sum / n)
	}
}

// newSample reads what belongs to a sample. ErrNotFound: some of it is no longer stored.
func newSample(
	ctx context.Context, b *bus.Bus, a *schemas.Advantage, m *view.Member, latents bool,
) (*sample, error) {
	t := m.Trajectory()
	if err := t.CheckKnown(); err != nil {
		return nil, err
	}
	s := &sample{of: t, media: map[string][]byte{}, Record: Record{
		Run: string(a.Run), UID: string(a.UID), SampleIndex: t.SampleIndex, Lane: string(t.Lane), Prompt: t.Prompt,
		GroupStatus: a.Status, Status: m.Status, Reward: m.Reward, Advantage: m.Advantage, Scores: []Score{},
		StepAdvantages: m.StepAdvantages, Validation: a.Validation,
		PolicyVersionMin: t.PolicyVersionMin, PolicyVersionMax: t.PolicyVersionMax, WeightsDigest: t.WeightsDigest,
		ContentDigest: t.ContentDigest, SampleSeed: t.SampleSeed,
	}}
	if i := t.Group.StageIndex(t.Stage); i >= 0 {
		s.Stage, s.Samples = string(t.Stage), t.Group.Stages[i].Every
	}
	for _, score := range m.Scores {
		s.Scores = append(s.Scores, Score{score.Name, score.Value, score.Members})
	}
	if t.Start != nil && t.Start.Branch != nil {
		at := t.Start.Branch
		s.Parent = &Parent{string(at.Run), string(at.UID), at.SampleIndex, string(at.Stage), at.StepIndex}
	}
	s.Path = pathOf(a, t.Group.Tree, t.SampleIndex)
	var err error
	if len(a.Metadata) > 0 {
		if s.Metadata, err = jsonText(a.Metadata); err != nil {
			return nil, err
		}
	}
	if t.Text != nil {
		return s, s.setText(ctx, b, t)
	}
	if s.Settings, err = jsonText(&t.Sampling); err != nil {
		return nil, err
	}
	s.CFGScales, s.LogProbs = t.CFGScales, t.LogProbs
	c := client.New(b)
	for _, kind := range t.MediaKinds() {
		if s.media[kind], err = c.Medium(ctx, t, kind); err != nil {
			return nil, err
		}
	}
	if s.conditions, err = readConditions(ctx, c, t.Conditions); err != nil {
		return nil, err
	}
	if !latents || len(t.LatentStepIndices) == 0 {
		return s, nil
	}
	kept, err := c.Latents(ctx, t)
	if err != nil {
		return nil, err
	}
	s.LatentIndices = t.LatentStepIndices
	s.LatentsShape = append([]int64{int64(len(t.LatentStepIndices))}, t.LatentsShape...)
	for _, i := range t.LatentStepIndices {
		if len(kept[i]) == 0 {
			return nil, fmt.Errorf("latents %d: %w", i, bus.ErrNotFound)
		}
		s.latents = append(s.latents, kept[i]...)
	}
	return s, nil
}

// setText sets what is of texts.
func (s *sample) setText(ctx context.Context, b *bus.Bus, t *schemas.Trajectory) error {
	x, err := view.LoadText(ctx, b, t)
	if err != nil {
		return err
	}
	if s.Messages, err = jsonText(x.Messages); err != nil {
		return err
	}
	s.Answer, s.FinishReason, s.Temperature = x.Answer, x.FinishReason, x.Temperature
	s.IDs, s.Mask, s.TokenLogProbs, s.ProcessedLogProbs = x.IDs, x.Mask, x.LogProbs, x.ProcessedLogProbs
	s.Turns, err = jsonText(x.Turns)
	return err
}

// jsonText returns a part of an event as JSON, with the names of the contract.
func jsonText(v any) (string, error) {
	text, err := json.Marshal(schemas.JSON(v))
	return string(text), err
}

// tensors returns the arrays of the sample; names begin with prefix.
func (s *sample) tensors(prefix string) (list []safetensors.Tensor, err error) {
	floats := func(name string, x []float32, shape ...int) {
		if len(x) == 0 || err != nil {
			return
		}
		var t safetensors.Tensor
		t, err = safetensors.FloatTensor(prefix+name, tensor.F32, shape, x)
		list = append(list, t)
	}
	integers := func(name string, x []int32) {
		if len(x) > 0 {
			list = append(list, safetensors.Tensor{
				Name: prefix + name, DType: tensor.I64, Shape: []int{len(x)}, Data: littleEndian(x),
			})
		}
	}
	if len(s.latents) > 0 {
		var shape []int
		for _, n := range s.LatentsShape {
			shape = append(shape, int(n))
		}
		floats("latents", s.latents, shape...)
	}
	floats("sigmas", s.of.Sigmas, len(s.of.Sigmas))
	floats("log_probs", numbers(s.LogProbs), len(s.LogProbs))
	integers("ids", s.IDs)
	integers("mask", s.Mask)
	floats("token_log_probs", s.TokenLogProbs, len(s.TokenLogProbs))
	floats("processed_log_probs", s.ProcessedLogProbs, len(s.ProcessedLogProbs))
	return slices.Clip(list), err
}
