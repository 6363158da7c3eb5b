// Package stages knows what a sample of several stages is made of, in which order, and out of what. A stage is made on
// one lane, or by an interaction, and has a request and a trajectory of its own. The stages of a group are a tree:
// its leaves are the samples, each sample of an inner stage stands for the leaves below it, and has the index of the
// first. A round runs all stages once more.
//
// Everything here is a function of the group's record and of stored trajectories, so whoever makes a request again
// makes the same one.
package stages

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/schemas"
)

// Place is a stage of a sample, by its token, such as think-2, and the index of the sample.
type Place = schemas.Place

// First returns the places of the first stage of a group.
func First(g *schemas.Group, size int64) []Place {
	return below(g.Stages[0].Name, 0, size, g.Stages[0].Every)
}

// below returns the places of a stage between two indices.
func below(token schemas.Stage, from, to, every int64) (list []Place) {
	for i := from; i < to; i += every {
		list = append(list, Place{Stage: token, SampleIndex: i})
	}
	return list
}

// Next returns the places that come after a trajectory; none: it is the last of its samples, or ended without success.
func Next(g *schemas.Group, t *schemas.Trajectory) []Place {
	if g.EndedBy(t) > 0 {
		return nil
	}
	i := g.StageIndex(t.Stage)
	_, round := t.Stage.Split()
	if i+1 == len(g.Stages) {
		return []Place{{Stage: g.Stages[0].Name.Token(round + 1), SampleIndex: t.SampleIndex}}
	}
	s := g.Stages[i+1]
	return below(s.Name.Token(round), t.SampleIndex, t.SampleIndex+g.Stages[i].Every, s.Every)
}

// Leaves returns the indices [from, to) of the samples that a stage of a sample leads to.
func Leaves(g *schemas.Group, at Place) (from, to int64) {
	if i := g.StageIndex(at.Stage); i >= 0 {
		return at.SampleIndex, at.SampleIndex + g.Stages[i].Every
	}
	return at.SampleIndex, at.SampleIndex + 1
}

// Path returns the places that lead to a sample, in the order in which they are made, up to and with those of a stage;
// "": all that there may be.
func Path(g *schemas.Group, sample int64, to schemas.Stage) (list []Place) {
	for round := int64(1); round <= g.Rounds; round++ {
		for _, s := range g.Stages {
			token := s.Name.Token(round)
			if list = append(list, Place{Stage: token, SampleIndex: sample - sample%s.Every}); token == to {
				return list
			}
		}
	}
	return list
}

// Open returns the place that a sample is at: the first on its path that is not made, and what was made before it;
// false: it has ended. before has all that was made for the sample then.
func Open(g *schemas.Group, sample int64, made func(Place) *schemas.Trajectory) (at Place, before []*schemas.Trajectory,
	open bool,
) {
	for _, at := range Path(g, sample, "") {
		t := made(at)
		if t == nil {
			return at, before, true
		}
		if before = append(before, t); len(Next(g, t)) == 0 {
			break
		}
	}
	return Place{}, before, false
}

// Standing returns which of the trajectories of a sample, in the order of its path, stands for it: the last one where
// that did not complete, or else the newest that a lane made; -1: there is none.
func Standing(made []*schemas.Trajectory) int {
	k := len(made) - 1
	for k > 0 && made[k].StopReason == schemas.StopCompleted && made[k].Group.IsInteraction(made[k].Stage) {
		k--
	}
	return k
}

// Judged returns which of the trajectories of a sample, in the order of its path, a reward function judges: the newest
// that it may; nil: none was made.
func Judged(g *schemas.Group, spec *schemas.RewardSpec, made []*schemas.Trajectory) *schemas.Trajectory {
	for _, t := range slices.Backward(made) {
		if i := g.StageIndex(t.Stage); i >= 0 && slices.Contains(g.Stages[i].JudgedBy, spec.Name) {
			return t
		}
	}
	return nil
}

// Put stores the file of an image and returns its reference.
type Put func(data []byte) (schemas.Ref, error)

// Request returns the request at a place of a group. made are the trajectories before it on its path, in order. An
// error of put is temporary; a Fault says that the request cannot be made.
func Request(record *schemas.GroupRecord, at Place, made []*schemas.Trajectory, put Put) (*schemas.Request, error) {
	g := &record.Group
	i := g.StageIndex(at.Stage)
	if i < 0 || i >= len(record.Stages) {
		return nil, &Fault{at.Stage, errors.New("not one of the group's stages")}
	}
	r := new(record.Stages[i])
	r.Run, r.UID, r.SampleIndex, r.Stage = record.Run, record.UID, at.SampleIndex, at.Stage
	r.GroupSize, r.Group = record.GroupSize, *g
	base := flow.RunBase(string(record.Run))
	if record.Seed != nil {
		base = flow.SeedBase(*record.Seed)
	}
	shared := r.NoiseSeed != r.SampleSeed
	of := string(record.UID) + "." + string(at.Stage)
	r.SampleSeed = flow.SampleSeed(base, of, int(at.SampleIndex))
	if r.NoiseSeed = r.SampleSeed; shared {
		r.NoiseSeed = flow.GroupSeed(base, of)
	}
	if tree := g.Stages[i].Tree; tree != nil {
		StartAtParent(r, tree, g.Stages[i].Every)
	}
	if err := fillTexts(r, record, made); err != nil {
		return nil, &Fault{at.Stage, err}
	}
	if err := addImages(r, made, put); err != nil {
		return nil, err
	}
	r.ScheduleDigest = r.ComputeScheduleDigest()
	if err := r.Validate(); err != nil {
		return nil, &Fault{at.Stage, err}
	}
	return r, nil
}

// Fault says why a request of a stage cannot be made: its samples fail.
type Fault struct {
	Stage schemas.Stage
	Err   error
}

func (f *Fault) Error() string { return fmt.Sprintf("stage %s: %v", f.Stage, f.Err) }

// Unwrap returns the cause.
func (f *Fault) Unwrap() error { return f.Err }

// fillTexts fills the templates of a request.
func fillTexts(r *schemas.Request, record *schemas.GroupRecord, made []*schemas.Trajectory) error {
	value := func(place string) (string, error) {
		of, what, _ := strings.Cut(place, ".")
		switch {
		case place == "prompt":
			return record.Prompt, nil
		case of == "metadata":
			return metadataText(record.Group.Metadata, what)
		}
		if t := newest(made, schemas.Stage(of)); t != nil && t.Text != nil {
			return t.Text.Answer(), nil
		}
		return "", nil // of a later round
	}
	var errs []error
	room := schemas.MaxEventBytes // of all texts: a request is an event
	set := func(field string, text *string) {
		filled, err := fill(*text, min(room, schemas.MaxAnswerBytes), value)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", field, err))
		}
		*text = filled
		room = max(room-len(filled), 0)
	}
	if r.Text == nil {
		set("prompt", &r.Prompt)
		set("negative_prompt", &r.NegativePrompt)
		set("prompt_2", &r.Prompt2)
		set("prompt_3", &r.Prompt3)
		return errors.Join(errs...)
	}
	r.Text = new(*r.Text)
	templates := r.Text.Messages
	r.Text.Messages = make([]schemas.Message, 0, len(templates)+2)
	if record.Group.IsInteraction(r.Stage) {
		r.Text.Messages = said(record, newest(made, r.Stage.Name()))
	}
	for i, m := range templates {
		set(fmt.Sprintf("messages[%d].content", i), &m.Content)
		r.Text.Messages = append(r.Text.Messages, m)
	}
	r.Prompt = r.Text.Messages[len(r.Text.Messages)-1].Content
	return errors.Join(errs...)
}

// said returns the conversation with an interaction up to its next answer: the prompt, then what it was told and what
// it said in the rounds before.
func said(record *schemas.GroupRecord, before *schemas.Trajectory) []schemas.Message {
	if before == nil || before.Text == nil {
		return []schemas.Message{{Role: schemas.RoleUser, Content: record.Prompt}}
	}
	list := append([]schemas.Message(nil), before.Text.Settings.Messages...)
	return append(list, schemas.Message{Role: schemas.RoleUser, Content: before.Text.Answer()})
}

// newest returns the last trajectory of a stage in any round; nil: there is none.
func newest(made []*schemas.Trajectory, name schemas.Stage) *schemas.Trajectory {
	for _, t := range slices.Backward(made) {
		if t.Stage.Name() == name {
			return t
		}
	}
	return nil
}

// addImages gives the conditions of a request that name a stage the file that it made. An error of put is returned as
// it is.
func addImages(r *schemas.Request, made []*schemas.Trajectory, put Put) error {
	r.Conditions = slices.Clone(r.Conditions)
	for i := range r.Conditions {
		c := &r.Conditions[i]
		if c.Stage == "" {
			continue
		}
		kind := schemas.KindImage
		if c.Type == schemas.KindVideo {
			kind = schemas.KindVideo
		}
		t := newest(made, c.Stage)
		if t == nil || t.Medium(kind) == nil {
			return &Fault{r.Stage, fmt.Errorf("conditions: %s: stage %s made no %s", c.Name, c.Stage, kind)}
		}
		m := t.Medium(kind)
		if c.Ref = m.Ref; m.Ref == nil {
			ref, err := put(m.Data)
			if err != nil {
				return fmt.Errorf("store the condition %s: %w", c.Name, err)
			}
			c.Ref = &ref
		}
	}
	return nil
}

// StartAtParent sets a request's start at its branch point of a tree: its leaf is every-th sample of the group. It adds
// the states that the sample's own children start with to those that are stored, and removes those before the start.
func StartAtParent(r *schemas.Request, tree *schemas.Tree, every int64) {
	leaf := r.SampleIndex / every % tree.Leaves()
	path := tree.Path(leaf)
	for depth, b := range tree.Branches {
		if tree.SampleOf(leaf, depth) == leaf {
			r.KeepState(b.StepIndex)
		}
	}
	r.CheckpointStepIndices = slices.DeleteFunc(slices.Clone(r.CheckpointStepIndices), func(k int64) bool {
		return slices.Contains(r.ReturnStepIndices, k)
	})
	if len(path) == 1 {
		return
	}
	at := &schemas.Branch{
		Run: r.Run, UID: r.UID, StepIndex: path[len(path)-1].Begin,
		SampleIndex: r.SampleIndex - (leaf-path[len(path)-2].SampleIndex)*every,
	}
	if r.Stage != schemas.StageMain {
		at.Stage = r.Stage
	}
	r.BranchOff(at)
}
