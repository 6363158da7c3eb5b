package outcomes

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

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
