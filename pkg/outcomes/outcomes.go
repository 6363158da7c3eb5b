// Package outcomes says what became of what is stored. It alone decides the outcome of a sample, a group and a run, and
// has the words for what waits; commands, the page, reports, intake's answers and clients show what it says.
//
// It reads nothing: its callers have counted.
package outcomes

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// Outcomes that no event has: all others are statuses of rewards, members, groups and runs (package schemas).
const (
	// Open is a group without a result.
	Open = "open"
	// Refilled is a group that counts for nothing: a fresh one stands in for it.
	Refilled = "refilled"
	// Awaited is a sample of an open group that has not been made; Made one that has no score yet.
	Awaited = "awaited"
	Made    = "made"
)

// Sample returns the outcome of a sample by its status in the result of its group, the reason why its trajectory
// stopped, and the status of its reward; each is "" while there is none.
func Sample(member, stop, reward string) string {
	switch {
	case member != "":
		return member
	case reward != "":
		return reward
	case stop == schemas.StopCompleted:
		return Made
	case stop != "":
		return stop // failed or pruned: its reward will say so too
	}
	return Awaited
}

// Group returns the outcome of a group by its result; nil: there is none.
func Group(a *schemas.Advantage) string {
	switch {
	case a == nil:
		return Open
	case a.RefilledBy != "":
		return Refilled
	}
	return a.Status
}

// Of returns the outcome that an event says; "": it says none.
func Of(e schemas.Event) string {
	switch e := e.(type) {
	case *schemas.Trajectory:
		return e.StopReason
	case *schemas.Reward:
		return e.Status
	case *schemas.Advantage:
		return Group(e)
	}
	return ""
}

// GroupOutcomes returns the outcomes that a group can have.
func GroupOutcomes() []string { return append([]string{Open, Refilled}, schemas.GroupStatuses...) }

// HasAdvantages reports whether a group of that outcome has advantages to train on.
func HasAdvantages(group string) bool {
	return group == schemas.StatusComplete || group == schemas.StatusPartial
}

// Groups counts groups by their outcomes.
type Groups map[string]int64

// All returns how many groups there are, without those that others stand in for.
func (g Groups) All() (n int64) {
	for outcome, of := range g {
		if outcome != Refilled {
			n += of
		}
	}
	return n
}

// Counts are what is stored of a run, as far as its outcome depends on it.
type Counts struct {
	Groups      Groups
	OpenBatches int64
	// Unanswered prompts are not yet accepted or refused; Refused ones have a dead letter and may have no group.
	Unanswered, Refused int64
	// Control is the action in force for the whole run; "": none.
	Control string
}

// Run returns the outcome of a run, one of schemas.RunStates. A run that has ended is what all its groups are; failed
// where they differ and none has advantages; else partial.
func (c *Counts) Run() string {
	switch {
	case c.Control == schemas.ControlCancel:
		return schemas.StatusCancelled
	case c.Control == schemas.ControlPause:
		return schemas.RunPaused
	case c.Groups[Open] > 0 || c.OpenBatches > 0 || c.Unanswered > 0:
		return schemas.RunRunning
	}
	all := c.Groups.All()
	if all == 0 && c.Refused > 0 {
		return schemas.StatusRefused
	} else if all == 0 {
		return schemas.RunRunning
	}
	for outcome, n := range c.Groups {
		if n == all && outcome != Refilled {
			return outcome
		}
	}
	for outcome := range c.Groups {
		if HasAdvantages(outcome) {
			return schemas.StatusPartial
		}
	}
	return schemas.StatusFailed
}

// HasEnded reports whether nothing more will come of a run with that outcome.
func HasEnded(run string) bool { return run != schemas.RunRunning && run != schemas.RunPaused }

// Tones of outcomes: what has gone well, goes on, lacks a part, or has nothing.
const (
	Good = "good"
	Info = "info"
	Warn = "warn"
	Bad  = "bad"
)

// Tone returns the tone of an outcome.
func Tone(outcome string) string {
	switch outcome {
	case schemas.StatusComplete, schemas.StatusScored, schemas.AppliedApplied, schemas.StopCompleted:
		return Good
	case schemas.RunRunning, Open, Made, Awaited:
		return Info
	case schemas.StatusFailed, schemas.StatusRefused, schemas.StatusCancelled, schemas.StatusMissing:
		return Bad
	}
	return Warn
}

// Tones returns the tones of all outcomes.
func Tones() map[string]string {
	tones := map[string]string{}
	for _, list := range [][]string{
		{Open, Refilled, Awaited, Made},
		schemas.RunStates, schemas.MemberStatuses, schemas.GroupStatuses,
		schemas.BatchStatuses, schemas.AppliedStates, schemas.StopReasons,
	} {
		for _, outcome := range list {
			tones[outcome] = Tone(outcome)
		}
	}
	return tones
}

// Said calls set with each header that says what became of an event, for readers of headers alone.
func Said(e schemas.Event, set func(header, value string)) {
	if outcome := Of(e); outcome != "" {
		set(schemas.HeaderOutcome, outcome)
	}
	switch e := e.(type) {
	case *schemas.Trajectory:
		set(schemas.HeaderLane, string(e.Lane))
		if len(e.Group.Stages) > 0 {
			set(schemas.HeaderSamples, strconv.FormatInt(e.Group.EndedBy(e), 10))
		}
	case *schemas.Advantage:
		if e.Mean != nil {
			set(schemas.HeaderMean, strconv.FormatFloat(*e.Mean, 'g', -1, 64))
		}
	case *schemas.Selection:
		set(schemas.HeaderSaved, strconv.FormatInt(e.SavedEvaluations, 10))
	}
}

// IsOutcome reports whether a text is an outcome.
func IsOutcome(text string) bool {
	_, is := Tones()[text]
	return is
}

// For is what work waits for.
type For string

// What work waits for, in the words of a badge: see Held.
const (
	ForIntake    For = "intake"
	ForSampler   For = "a sampler"
	ForSpace     For = "space"
	ForReward    For = "a reward service"
	ForVerdict   For = "a verdict"
	ForScore     For = "a score"
	ForGroup     For = "the group"
	ForBatch     For = "the batch"
	ForAdvantage For = "the advantage service"
	ForResume    For = "resume"
)

// Held says it in a few words; "" where nothing is waited for.
func (f For) Held() string {
	if f == "" {
		return ""
	}
	return "waiting for " + string(f)
}

// Wait is something that work waits for, in words.
type Wait struct {
	// For is what is waited for; "": only Says says it.
	For For `json:"for,omitempty"`
	// Rule is one that a run has broken: nothing waits for it, unless the run is paused.
	Rule string `json:"rule,omitempty"`
	// Grave says that nothing goes on until a person does something; Fix says what.
	Grave bool   `json:"grave"`
	Says  string `json:"says"`
	Fix   string `json:"fix,omitempty"`
}

// Text returns all of it in one line: what is waited for, why, and what to do.
func (w Wait) Text() string {
	text := cmp.Or(w.For.Held(), "waiting") + ": " + w.Says
	if w.Fix != "" {
		text += ". " + w.Fix
	}
	return text
}

// Facts are what decides what holds up an open run.
type Facts struct {
	// Full says that a stream, or the disk, has no space.
	Full bool
	// Sampler and Reward: such a service runs; Unserved: samples wait in a lane without a sampler.
	Sampler, Reward, Unserved bool
	// Unanswered prompts, Unmade and Unscored samples; Judged of the latter wait for a verdict.
	Unanswered, Unmade, Unscored, Judged int64
	// Midway are those of Unmade that wait at a step until all samples of their group have a reward there.
	Midway int64
	// Batches are open while no group is: prompts of them are still to come.
	Batches int64
}

// Incomplete says that batches wait for prompts that nobody has published, and what to do.
func Incomplete(run schemas.Run, batches int64) Wait {
	w := Wait{
		For: ForBatch, Says: "1 batch waits for prompts of it that nobody has published; it keeps its space",
		Fix: fmt.Sprintf("publish the rest, or end it with: meander cancel %s", run),
	}
	if batches != 1 {
		w.Says = fmt.Sprintf("%d batches wait for prompts of them that nobody has published; they keep their space",
			batches)
	}
	return w
}

// Midway says that samples wait at a step for the others of their group.
func Midway(samples int64) Wait {
	w := Wait{For: ForGroup, Says: "1 sample waits at a step until all of its group have a reward there"}
	if samples != 1 {
		w.Says = fmt.Sprintf("%d samples wait at a step until all of their groups have a reward there", samples)
	}
	return w
}

// Lost says that samples are neither made nor asked for, and what to do.
func Lost(samples int64) Wait {
	w := Wait{
		For: ForIntake, Grave: true, Says: "1 sample is neither made nor asked for: its request was lost",
		Fix: "Intake asks again within seconds, if it runs; find out who purged " + schemas.StreamRequests +
			", or see the server's log",
	}
	if samples != 1 {
		w.Says = fmt.Sprintf("%d samples are neither made nor asked for: their requests were lost", samples)
	}
	return w
}

// HeldBy returns what holds up an open run; "": nothing, it goes on.
func (f *Facts) HeldBy() For {
	switch {
	case f.Full:
		return ForSpace
	case f.Unserved || !f.Sampler && f.Unanswered+f.Unmade > 0:
		return ForSampler
	case f.Unmade == 0 && f.Unscored == 0 && f.Unanswered == 0 && f.Batches > 0:
		return ForBatch
	case f.Midway > 0 && f.Midway >= f.Unmade && f.Reward:
		return ForGroup
	case f.Midway > 0 && f.Midway >= f.Unmade:
		return ForReward
	case f.Unmade > 0 || f.Unscored == 0:
		return ""
	case f.Judged >= f.Unscored:
		return ForVerdict
	case !f.Reward:
		return ForReward
	}
	return ""
}

// lacks says what is wrong with groups by their outcome, after how many there are.
var lacks = map[string]string{
	schemas.StatusPartial:   "with samples that have no reward",
	schemas.StatusFailed:    "failed",
	schemas.StatusShort:     "with too few rewards",
	schemas.StatusMixed:     "with weights that are too far apart, or several schedules",
	schemas.StatusStale:     "with weights that are too old",
	schemas.StatusRefused:   "refused",
	schemas.StatusCancelled: "cancelled",
	Open:                    "without a result",
	schemas.StatusFiltered: "left out because all rewards are equal (--zero-std) " +
		"and no fresh group replaced them",
}

// Lacks says what is wrong with groups of an outcome, after how many there are; "": nothing.
func Lacks(group string) string { return lacks[group] }

// FixRefused says what to do about a prompt that was refused for a reason.
func FixRefused(uid schemas.UID, reason string) string {
	what := "the prompt"
	if field, _, named := strings.Cut(reason, ": "); named && !strings.Contains(field, " ") {
		what = field
	}
	return fmt.Sprintf("Correct %s, and publish the prompt again with another uid: %q is used", what, uid)
}

// FixGroup says what to do about a group of an outcome, and the reason that it has; "": nothing.
func FixGroup(run schemas.Run, uid schemas.UID, outcome, reason string) string {
	const again = "--failed-groups refill has a fresh group take the place of such a one"
	switch outcome {
	case schemas.StatusRefused:
		return FixRefused(uid, reason)
	case schemas.StatusFailed:
		return fmt.Sprintf("See its samples with 'meander show --run %s %s'; %s", run, uid, again)
	case schemas.StatusMixed:
		return again + "; --max-policy-span takes versions of the weights that are further apart"
	case schemas.StatusStale:
		return again + "; --max-policy-lag takes older weights"
	case schemas.StatusFiltered:
		return "--zero-std refill has a fresh group take its place; --zero-std keep counts it, with advantages of 0"
	case schemas.StatusCancelled:
		return "Publish the prompt again under another run: what is cancelled stays so"
	}
	return ""
}

// FixSample says what to do about a sample of an outcome, which is stored or not, or about a reward function that
// failed on one; "": nothing.
func FixSample(run schemas.Run, outcome string, stored bool) string {
	switch {
	case outcome == schemas.StatusFailed && stored:
		return fmt.Sprintf("The sample is stored: when the cause is gone, score it with 'meander rescore --run %s'",
			run)
	case outcome == schemas.StatusFailed:
		return "End the cause, see 'meander doctor', and publish the prompt again with another uid"
	case outcome == schemas.StatusMissing:
		return "Its reward had not come when the group closed: --deadline gives the samples of a prompt more time"
	}
	return ""
}

// letterFixes are those of dead letters, by their code.
var letterFixes = map[string]string{
	schemas.CodeDecode:        "These bytes are no event: mend the program that published them",
	schemas.CodeInvalid:       "Mend the program that published it",
	schemas.CodeUnknownModel:  "Start a sampler of that model, then replay it",
	schemas.CodeUnknownReward: "Start a reward service that has that function, then replay it",
	schemas.CodeUIDConflict:   "Publish the prompt again with another uid",
	schemas.CodeExhausted:     "End the cause, then replay it",
	schemas.CodeLate:          "Nothing: its group had closed",
	schemas.CodeFailed:        "End the cause, and publish the prompt again with another uid",
	schemas.CodePanic:         "The program has a fault: report it with its log",
	schemas.CodeTooLarge:      "Publish a smaller one",
	schemas.CodeCancelled:     "Nothing: someone has cancelled it",
	schemas.CodeDisplaced:     "Mend the program that published in the place of another event",
}

// FixLetter says what to do about a dead letter of a service, by its code.
func FixLetter(service, code string) string {
	if service == schemas.ServiceIntake && code == schemas.CodeInvalid {
		return "Correct the prompt, and publish it again with another uid"
	}
	return cmp.Or(letterFixes[code], "Read the reason, and end the cause")
}
