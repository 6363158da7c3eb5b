package intake

import (
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// A template that asks for the day gets the day on which the prompt was stored, the same for all samples and for the
// prompt when it is delivered again; or the one that the prompt fixes.
func TestResolve_Day(t *testing.T) {
	t.Parallel()
	policy := func(dated bool) *schemas.Policy {
		return &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "l", Model: "l", Family: "qwen2", WeightsDigest: "w", Announced: 1, Reward: []string{"entropy_mean"},
			Text: &schemas.TextPolicy{Vocabulary: 32, MaxTokens: 64, MaxNewTokens: 16, Temperature: 1, TopP: 1, Dated: dated},
		}
	}
	late := time.Date(2026, 11, 28, 23, 59, 0, 0, time.UTC)
	resolve := func(dated bool, at time.Time, variables map[string]string) []*schemas.Request {
		t.Helper()
		p := &schemas.Prompt{
			UID: "u", Prompt: "1+1=?", GroupSize: new(int64(2)), Text: &schemas.Text{ChatTemplateKwargs: variables},
		}
		requests, err := Resolve("r", p, policy(dated), Origin{Seq: uint64(at.Unix()), Created: at})
		if err != nil {
			t.Fatal(err)
		}
		return requests
	}
	day := func(r []*schemas.Request) string { return r[0].Text.ChatTemplateKwargs[schemas.StrftimeNow] }
	first := resolve(true, late, nil)
	again, next := resolve(true, late, nil), resolve(true, late.Add(time.Hour), nil)
	if day(first) != "2026-11-28" || day(next) != "2026-11-29" ||
		first[1].Text.ChatTemplateKwargs[schemas.StrftimeNow] != "2026-11-28" {
		t.Errorf("days %q and %q", day(first), day(next))
	}
	if first[0].ScheduleDigest != again[0].ScheduleDigest || first[0].ScheduleDigest == next[0].ScheduleDigest {
		t.Error("the schedule digest must have the day, and no time")
	}
	fixed := map[string]string{schemas.StrftimeNow: "2024-07-26"}
	if got := resolve(true, late, fixed); day(got) != "2024-07-26" {
		t.Errorf("fixed: %q", day(got))
	}
	if plain := resolve(false, late, nil); plain[0].Text.ChatTemplateKwargs != nil {
		t.Errorf("a template that asks for no day: %v", plain[0].Text.ChatTemplateKwargs)
	}
	for name, value := range map[string]string{"messages": "x", schemas.StrftimeNow: "today"} {
		p := &schemas.Prompt{
			UID: "u", Prompt: "1+1=?", Text: &schemas.Text{ChatTemplateKwargs: map[string]string{name: value}},
		}
		if err := p.Validate(); err == nil || !strings.Contains(err.Error(), "text.chat_template_kwargs."+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	a, _ := first[0].Record()
	b, _ := next[0].Record()
	if err := checkSameGroup(a, b); err == nil || !strings.Contains(err.Error(), "differs in schedule") {
		t.Errorf("the same prompt on another day: %v; want the difference", err)
	}
}
