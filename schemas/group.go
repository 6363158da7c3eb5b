package schemas

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// GroupRecord describes the group of a prompt. Intake stores it before it asks for the first
// sample. Its subject is the claim of the uid: it keeps one record, so only one prompt can have
// the uid. A copy of the record opens the group in the stream of rewards (see Opening).
type GroupRecord struct {
	V         int64 `msgpack:"v"`
	Run       Run   `msgpack:"run" form:"token"`
	UID       UID   `msgpack:"uid" form:"token"`
	GroupSize int64 `msgpack:"group_size" range:"1..MaxGroupSize"`
	// Error says why the prompt was refused; empty: it was accepted. The group of a refused
	// prompt has a result too, and keeps its uid.
	Error string `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	// Cancelled says that a control ended the group before intake had taken it up; Error says which.
	Cancelled bool `msgpack:"cancelled,omitempty"`
	// PromptDigest names the resolved prompt (see Request.PromptDigest); empty when refused,
	// and where stored trajectories are scored again.
	PromptDigest string `msgpack:"prompt_digest" form:"digest?"`
	// Prompt to ScheduleDigest are copied from the request of sample 0, and empty where PromptDigest is: they tell how
	// another prompt of the same uid differs.
	Prompt         string `msgpack:"prompt" size:"0..MaxPromptBytes"`
	NegativePrompt string `msgpack:"negative_prompt" size:"0..MaxPromptBytes"`
	Lane           Lane   `msgpack:"lane" form:"token?"`
	// Tenant is the one whose weights of the lane make the samples.
	Tenant Tenant `msgpack:"tenant,omitempty" form:"token" absent:"main"`
	// BaseDigest names the checkpoint of the lane that all samples of the group are made with; empty: it is not known.
	BaseDigest     string `msgpack:"base_digest,omitempty" size:"0..MaxName"`
	SampleSeed     uint64 `msgpack:"sample_seed"`
	NoiseSeed      uint64 `msgpack:"noise_seed"`
	ScheduleDigest string `msgpack:"schedule_digest" form:"digest?"`
	// StepBytes is the most that the steps of all samples take in MDR_STEPS; 0: not known.
	StepBytes int64 `msgpack:"step_bytes,omitempty" range:"0.."`
	// Stages are the requests of sample 0 for each stage, resolved, with what is not known yet: their texts are
	// templates, and conditions name stages. Requests are made of them as stages end. Absent without stages, and in the
	// Opening.
	Stages []Request `msgpack:"stages,omitempty" size:"0..MaxStages"`
	// Seed is that of the prompt, for the seeds of later stages.
	Seed *int64 `msgpack:"seed,omitempty" range:"0.." absent:"the run id seeds"`
	// Group is what later stages need. It counts, whatever an event of the group says.
	Group Group `msgpack:"group"`
}

// Opening is the copy of a GroupRecord in the stream of rewards, by which the advantage service knows the group.
type Opening GroupRecord

// Type returns the type of the record.
func (*Opening) Type() string { return TypeGroup }

// Subject returns the subject on which the copy is published: its run, batch and uid name it.
func (o *Opening) Subject() string { return OpeningSubject(o.Run, o.Group.Batch, o.UID) }

// Validate returns all faults of the record, joined.
func (o *Opening) Validate() error { return (*GroupRecord)(o).Validate() }

// Record returns the record of the group, given the request of its sample 0.
func (e *Request) Record() (*GroupRecord, error) {
	digest, err := e.PromptDigest()
	return &GroupRecord{
		Run: e.Run, UID: e.UID, GroupSize: e.GroupSize, PromptDigest: digest,
		Prompt: e.Prompt, NegativePrompt: e.NegativePrompt, Lane: e.Lane, Tenant: e.Tenant,
		BaseDigest: e.BaseDigest,
		SampleSeed: e.SampleSeed, NoiseSeed: e.NoiseSeed, ScheduleDigest: e.ScheduleDigest, Group: e.Group,
	}, err
}

// PromptDigest returns the BLAKE3 of the encoded request of a group's
// sample 0: everything that a prompt says about what is made and how it is scored. Fields that may
// change when a prompt is published again are zero in it: priority, group.deadline,
// group.prompt_seq and group.created. The checkpoint is compared separately (see Differences).
func (e *Request) PromptDigest() (string, error) {
	c := *e
	c.BaseDigest, c.Priority, c.Group.Deadline, c.Group.PromptSeq, c.Group.Created = "", 0, 0, 0, 0
	data, err := Encode(&c)
	if err != nil {
		return "", fmt.Errorf("digest of the prompt %s: %w", e.UID, err)
	}
	return BLAKE3.Text(BLAKE3.Sum(data)), nil
}

// StagesDigest is the PromptDigest of a group with stages: the BLAKE3 of its text and of the digests of its
// stages' requests.
func (e *GroupRecord) StagesDigest() (string, error) {
	d := newDigester("meander stages 1")
	d.addText(e.Prompt)
	for i := range e.Stages {
		text, err := e.Stages[i].PromptDigest()
		if err != nil {
			return "", err
		}
		d.addText(text)
	}
	return d.text(), nil
}

// Differences returns the names of what differs between two prompts of one uid, mostly fields of a
// Prompt; nil if nothing does.
func (e *GroupRecord) Differences(other *GroupRecord) []string {
	var names []string
	if a, b := e.BaseDigest, other.BaseDigest; a != "" && b != "" && a != b {
		names = append(names, fmt.Sprintf("the checkpoint of the model (%.16s, not %.16s)", a, b))
	}
	if e.PromptDigest == other.PromptDigest {
		return names
	}
	if e.Lane != other.Lane {
		names = append(names, fmt.Sprintf("model (%s, not %s)", e.Lane, other.Lane))
	}
	if e.Tenant != other.Tenant {
		names = append(names, fmt.Sprintf("tenant (%s, not %s)", e.Lineage().Tenant, other.Lineage().Tenant))
	}
	a, b := &e.Group, &other.Group
	for _, part := range []struct {
		name string
		a, b any
	}{
		{"prompt", e.Prompt, other.Prompt},
		{"negative_prompt", e.NegativePrompt, other.NegativePrompt},
		{"group_size", e.GroupSize, other.GroupSize},
		{"seed", e.SampleSeed, other.SampleSeed},
		{"initial_noise", e.NoiseSeed == e.SampleSeed, other.NoiseSeed == other.SampleSeed},
		{"schedule", e.ScheduleDigest, other.ScheduleDigest},
		{"reward", a.Reward, b.Reward},
		{"advantage", a.Advantage, b.Advantage},
		{"credit", a.Credit, b.Credit},
		{
			"batch",
			[]any{a.Batch, a.BatchGroups, a.BatchStep, a.BatchEpoch},
			[]any{b.Batch, b.BatchGroups, b.BatchStep, b.BatchEpoch},
		},
		{"group_policy", a.GroupPolicy, b.GroupPolicy},
		{"rules", a.Rules, b.Rules},
		{"tree", a.Tree, b.Tree},
		{"refill", a.Refill, b.Refill},
		{"metadata", a.Metadata, b.Metadata},
		{"validation", a.Validation, b.Validation},
		{"free_read_steps", a.FreeReadSteps, b.FreeReadSteps},
	} {
		if !reflect.DeepEqual(part.a, part.b) {
			names = append(names, part.name)
		}
	}
	if names == nil && len(e.Stages)+len(other.Stages) > 0 {
		return []string{"stages or rounds"}
	}
	if names == nil {
		return []string{"negative_prompt (absent or empty), rollout, start, stop, scheduled_sampling, messages or text"}
	}
	return names
}

// MadeAgain returns an error for each field in which the record differs from the one that its prompt was resolved to
// again, joined. What depends on when that was may differ: the group's times, and what its steps take.
func (e *GroupRecord) MadeAgain(again *GroupRecord) (err error) {
	got, want := *e, *again
	want.Group.Created, want.Group.Deadline = e.Group.Created, e.Group.Deadline
	if !got.Group.Same(&want.Group) {
		err = errors.New("group: not that of the prompt")
	}
	digest := e.PromptDigest
	if len(e.Stages) > 0 {
		digest, _ = e.StagesDigest()
	}
	if digest != again.PromptDigest || digest != e.PromptDigest {
		err = errors.Join(err, fmt.Errorf("its record has other %s", strings.Join(e.Differences(again), ", ")))
	}
	want.V, want.StepBytes, want.PromptDigest, want.Stages, want.Group = e.V, e.StepBytes, e.PromptDigest, e.Stages,
		e.Group
	return errors.Join(append(differences(&got, &want), err)...)
}

// checkRules checks that an accepted prompt has its digests and its lane.
func (e *GroupRecord) checkRules(f *faults) {
	if e.Error == "" && e.Group.SourceRun == "" {
		f.requireDigest("prompt_digest", e.PromptDigest, FormDigest)
		if e.Lane == "" {
			f.checkToken("lane", string(e.Lane))
		}
		f.requireDigest("schedule_digest", e.ScheduleDigest, FormDigest)
	}
	e.Group.checkRulesAcross(f.inStruct("group"), e.UID, e.GroupSize)
}

// CheckGroup returns an error if an event describes its group (size and g) differently than the group's record; nil if
// not.
func (e *GroupRecord) CheckGroup(size int64, g *Group) error {
	switch {
	case e.Error != "":
		return fmt.Errorf("group: its prompt was refused: %s", e.Error)
	case size != e.GroupSize:
		return fmt.Errorf("group_size: %d; must be %d, as in the group's record", size, e.GroupSize)
	case !g.Same(&e.Group):
		return errors.New("group: not that of the group's record")
	}
	return nil
}
