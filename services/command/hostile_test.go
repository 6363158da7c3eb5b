package command

import (
	"strings"
	"testing"
	"unicode"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// unseen is what a terminal would obey, turn round or not show: C0, C1, bidi, zero width, and a tag.
const unseen = "evil\a\b\x1b[2J\x1b]0;x\x07\u009b31m\u0085\u202e\u2066\u200b\u2060\ufeff\U000e0041\x7f"

// No command passes what strangers wrote to the terminal as it is, neither as text nor as JSON.
func TestCommands_Hostile(t *testing.T) {
	bustest.Sequential(t, others)
	inStore(t)
	b := connected(t)
	g := groupOfRun(t, b.Bus, "r1")
	g.prompt = []byte(unseen + "\x9b")
	g.record.Prompt = unseen
	for _, x := range g.trajectories {
		x.Prompt = unseen
	}
	g.trajectories[1].StopReason, g.trajectories[1].Error = schemas.StopFailed, unseen
	g.trajectories[1].Media, g.trajectories[1].ContentDigest = nil, ""
	g.fail(1)
	g.rewards[1].Error = unseen
	g.rewards[0].Scores[0].Detail = unseen
	g.closeAs(schemas.StatusFailed, schemas.StatusFailed)
	g.result.Error = unseen
	g.letter = &schemas.Dead{
		Service: schemas.ServiceIntake, Code: schemas.CodeInvalid, Reason: unseen, OriginalSubject: unseen, Stream: unseen,
		StreamSeq: 1, Headers: []schemas.Header{{Name: unseen, Value: unseen}}, Data: []byte(unseen + "\x9b"),
	}
	g.control = &schemas.Control{Action: schemas.ControlPause, By: unseen, Reason: unseen}
	g.store(t, b.Bus, "evil")
	said := 0
	for _, args := range [][]string{
		{"dead", "ls"},
		{"dead", "show", "1"},
		{"dead", "replay", "99"},
		{"status", "evil"},
		{"show", "--run", "evil"},
		{"show", "p", "--run", "evil"},
		{"top", "--once"},
		{"top", "--columns", "60"},
		{"watch", "--run", "evil", "--count", "4"},
		{"runs", "ls"},
		{"runs", "show", "evil"},
		{"streams"},
		{"report", "evil", "--out", "evil.html"},
		{"verify", "--run", "evil"},
		{"trace", "--run", "evil", "--uid", "p"},
		{"doctor"},
		{"status", unseen},
		{"show", unseen},
		{unseen},
		{"--" + unseen},
		{"publish", "--run", unseen, unseen},
	} {
		for _, more := range [][]string{nil, {"--json"}} {
			if args[0] == "trace" && more != nil {
				continue
			}
			var out, errs text
			Execute(t.Context(), append(args, more...), strings.NewReader(""), &out, &errs)
			all := out.String() + errs.String()
			if i := strings.IndexFunc(all,
				func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r != '\t' }); i >= 0 {
				t.Errorf("%q passes on %q", append(args, more...), all[max(0, i-60):min(len(all), i+20)])
			}
			if strings.Contains(all, "evil") {
				said++
			}
		}
	}
	if said < 20 {
		t.Errorf("%d answers have the text at all", said)
	}
}
