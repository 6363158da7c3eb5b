package schemas

import (
	"fmt"
	"time"
)

// Control asks that a run, or a part of it, stops, waits or goes on. Operators of the pipeline
// publish it. Intake puts the controls that it accepts into the key-value bucket ControlBucket
// under ControlKey, where every service sees them; from then on they are in force.
type Control struct {
	V   int64 `msgpack:"v"`
	Run Run   `msgpack:"run" form:"token"`
	// Action is cancel: the run, or one group of it, ends without what it lacks; pause: the
	// samplers take no more steps of the run; resume: they go on; prune: one sample ends in the
	// middle, and its group closes without it; or status, which asks how the run is doing and
	// changes nothing.
	Action string `msgpack:"action" enum:"ControlActions"`
	// UID is the group to cancel, or the group whose sample is pruned; absent: the run.
	UID UID `msgpack:"uid,omitempty" form:"token"`
	// SampleIndex is the place in its group of the sample to prune; absent unless pruning.
	SampleIndex *int64 `msgpack:"sample_index,omitempty" range:"0..MaxGroupSize-1"`
	// StepIndex is the first boundary at which the sample is pruned: the steps before it run.
	StepIndex int64 `msgpack:"step_index,omitempty" range:"0..MaxSteps-1"`
	// By says who asks and Reason why, for people.
	By     string `msgpack:"by" size:"0..MaxName,cut"`
	Reason string `msgpack:"reason,omitempty" size:"0..MaxText,cut"`
	// At is when it was asked, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
	// Seq is its sequence in MDR_CONTROL and Stored when it was stored there, Unix nanoseconds:
	// set by intake in ControlBucket, and counted for nothing elsewhere.
	Seq    uint64 `msgpack:"seq,omitempty"`
	Stored int64  `msgpack:"stored,omitempty" range:"0.."`
}

// ControlReceipt is intake's answer to a control that asked for one by the header
// HeaderReply. It is a core NATS message, not stored.
type ControlReceipt struct {
	V        int64 `msgpack:"v"`
	Accepted bool  `msgpack:"accepted"`
	Run      Run   `msgpack:"run" size:"0..MaxToken"`
	UID      UID   `msgpack:"uid,omitempty" size:"0..MaxToken"`
	// Seq is the control's sequence in MDR_CONTROL: a sampler whose presence names it, or a
	// later one, obeys it.
	Seq uint64 `msgpack:"seq"`
	// Code and Error are set when refused.
	Code  string `msgpack:"code,omitempty" enum:"DeadCodes"`
	Error string `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	// Unchanged is why an accepted control changed nothing; absent: it changed something.
	Unchanged string `msgpack:"unchanged,omitempty" size:"0..MaxText,cut"`
	// Requests is how many requests that no sampler had finished were removed, or put back
	// into their queue.
	Requests int64 `msgpack:"requests" range:"0.."`
	// Status is how the run is doing.
	Status *RunStatus `msgpack:"status,omitempty"`
}

// RunStatus is how a run is doing.
type RunStatus struct {
	// State is running or paused; or, where each group and batch has its result, what became of it: the status
	// that all its groups have, failed where these differ and none has advantages, partial where some do; refused
	// without any group; or cancelled.
	State string `msgpack:"state" enum:"RunStates"`
	// WaitsFor is what an open run waits for, such as "a sampler"; absent: it goes on.
	WaitsFor string `msgpack:"waits_for,omitempty" size:"0..MaxText"`
	// By, Reason and Since describe the control that paused or cancelled it; Since is when it was stored, Unix
	// nanoseconds.
	By     string `msgpack:"by,omitempty" size:"0..MaxName"`
	Reason string `msgpack:"reason,omitempty" size:"0..MaxText"`
	Since  int64  `msgpack:"since,omitempty" range:"0.."`
	// Groups is how many groups intake has taken up, Closed how many of them have a result,
	// Cancelled how many were cancelled one by one.
	Groups    int64 `msgpack:"groups" range:"0.."`
	Closed    int64 `msgpack:"closed" range:"0.."`
	Cancelled int64 `msgpack:"cancelled" range:"0.."`
	// Outcomes counts the groups by what became of them, sorted by name: open, refilled (another group stands in for
	// it), or the status of the result.
	Outcomes []OutcomeCount `msgpack:"outcomes,omitempty" size:"0..MaxOutcomes"`
	// OpenBatches is how many batches that groups of the run are in have not closed.
	OpenBatches int64 `msgpack:"open_batches" range:"0.."`
	// Trajectories counts the samples that were made, Rewards the ones with a reward, Failed the ones that ended
	// without: failed and pruned ones. Waiting is how many requests are in a queue or in a sampler's hands, Parked how
	// many wait for the run to be resumed.
	Trajectories int64 `msgpack:"trajectories" range:"0.."`
	Rewards      int64 `msgpack:"rewards" range:"0.."`
	Failed       int64 `msgpack:"failed,omitempty" range:"0.."`
	Waiting      int64 `msgpack:"waiting" range:"0.."`
	Parked       int64 `msgpack:"parked" range:"0.."`
	// Midway is how many samples wait at a step until all of their group have a reward there, SavedEvaluations how many
	// evaluations of the network those that were ended by such rewards did not take.
	Midway           int64 `msgpack:"midway,omitempty" range:"0.."`
	SavedEvaluations int64 `msgpack:"saved_evaluations,omitempty" range:"0.."`
	// Refused counts the prompts that were refused and have no group, such as unreadable ones: each is a dead letter.
	Refused int64 `msgpack:"refused,omitempty" range:"0.."`
	// Lost is how many samples of open groups are neither made nor asked for: their requests were lost, and intake asks
	// again for them.
	Lost int64 `msgpack:"lost,omitempty" range:"0.."`
}

// OutcomeCount is how many groups have an outcome.
type OutcomeCount struct {
	// Outcome is what became of the groups, Groups how many they are.
	Outcome string `msgpack:"outcome" size:"1..MaxName"`
	Groups  int64  `msgpack:"groups" range:"1.."`
}

// Parked is a request of a paused run, out of its lane's queue: it holds no slot and costs
// no delivery until the run is resumed.
type Parked Request

// Type returns the type of a request: a parked request is the same event on another subject.
func (*Parked) Type() string { return TypeRequest }

// Subject returns the subject on which a request waits: its run, lane, uid and sample name it.
func (e *Parked) Subject() string {
	return ParkedSubject(e.Run, e.Lane, e.UID, e.SampleIndex, e.Stage)
}

// Validate returns all faults of the request, joined.
func (e *Parked) Validate() error { return (*Request)(e).Validate() }

func (e *Control) Subject() string { return ControlSubject(e.Run) }

// checkRules checks that each action has the uid and sample that it needs, and no others.
func (e *Control) checkRules(f *faults) {
	switch {
	case e.Action == ControlPrune:
		f.checkToken("uid", string(e.UID))
		if e.SampleIndex == nil {
			f.add("sample_index", "null", "must be there: prune is for one sample")
		}
	case e.SampleIndex != nil || e.StepIndex != 0:
		f.add("sample_index", "present", "must be absent, as step_index: only prune is for one sample")
	case e.UID != "" && e.Action != ControlCancel:
		f.add("uid", quote(string(e.UID)), "must be absent: only cancel and prune are for a part of a run")
	}
}

// checkRules checks that code and error are there exactly if the control was refused.
func (e *ControlReceipt) checkRules(f *faults) {
	switch {
	case !e.Accepted:
		f.requireOneOf("code", e.Code, DeadCodes)
		f.requireText("error", e.Error)
	case e.Code != "" || e.Error != "":
		f.add("code", quote(e.Code), "must be empty, as error, when accepted")
	}
}

// ControlSubject returns the subject on which controls of a run are published.
func ControlSubject(run Run) string { return Prefix + KindControl + "." + string(run) }

// ParkedSubject returns the subject of a parked request: that of one sample of a paused run.
func ParkedSubject(run Run, lane Lane, uid UID, sample int64, stage Stage) string {
	return Prefix + KindParked + "." + string(run) + "." + string(lane) + "." + sampleTail(uid, sample, stage)
}

// Key returns the key in ControlBucket under which the control is kept.
func (e *Control) Key() string {
	if e.SampleIndex != nil {
		return PruneKey(e.Run, e.UID, *e.SampleIndex)
	}
	return ControlKey(e.Run, e.UID)
}

// PruneKey returns the key in ControlBucket of the control that prunes a sample.
func PruneKey(run Run, uid UID, sample int64) string {
	return string(run) + "." + string(uid) + "." + itoa(sample)
}

// ControlKey returns the key in ControlBucket of the newest control of a run (uid empty), or of one of its groups.
func ControlKey(run Run, uid UID) string {
	if uid == "" {
		return string(run)
	}
	return string(run) + "." + string(uid)
}

// Sentence returns a sentence for people: what was paused, cancelled, ..., by whom, when and why.
func (e *Control) Sentence() string {
	verb := map[string]string{
		ControlCancel: "cancelled", ControlPause: "paused", ControlResume: "resumed",
		ControlPrune: "pruned",
	}[e.Action]
	what, by := "run "+string(e.Run), ""
	if e.UID != "" {
		what = "group " + string(e.UID)
	}
	if e.SampleIndex != nil {
		what = "sample " + itoa(*e.SampleIndex) + " of " + what
	}
	if e.By != "" {
		by = " by " + e.By
	}
	text := fmt.Sprintf("%s was %s%s at %s", what, verb, by, time.Unix(0, e.Stored).UTC().Format(time.RFC3339))
	if e.Reason != "" {
		text += ": " + e.Reason
	}
	return text
}
