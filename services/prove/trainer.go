package prove

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// replay has the trainer make an update again, out of the archive. What it prints, a link as JSON, is added.
func (p *prover) replay(ctx context.Context, archive string, u *schemas.Update, of string) error {
	switch {
	case !p.asked(LinkUpdate, of):
		return nil
	case len(p.options.Trainer) == 0:
		p.add(LinkUpdate, of, LeftOut, "no trainer is named that makes it again (--trainer meander-train)")
		return nil
	case u.Settings == "":
		p.add(LinkUpdate, of, Unchecked, "it does not tell its settings: an older or another trainer")
		return nil
	}
	args := append(slices.Clone(p.options.Trainer[1:]), "--replay", fmt.Sprintf("%s@%d", archive, u.Step), "--json",
		"--lane", string(u.Lane), "--tenant", string(u.Lineage().Tenant), "--trainer", u.Trainer)
	c := exec.CommandContext(ctx, p.options.Trainer[0], args...)
	var said strings.Builder
	c.Stderr = &said
	out, err := c.Output()
	if _, failed := errors.AsType[*exec.ExitError](err); err != nil && !failed {
		return &SettingError{fmt.Errorf("--trainer: %w", err)}
	}
	var told struct {
		Link
		// Off is how far new weights, of the same gradients and moments, are off, as a share of the step's length.
		Off float64 `json:"off"`
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if wrong := json.Unmarshal([]byte(lines[len(lines)-1]), &told); wrong != nil || told.Link.Link != LinkUpdate ||
		!slices.Contains([]string{Holds, Broken, Unchecked}, told.Verdict) {
		lines = strings.Split(strings.TrimSpace(said.String()), "\n")
		p.add(LinkUpdate, of, Unchecked, "%s: %v: %s", p.options.Trainer[0], err, lines[len(lines)-1])
		return nil
	}
	switch passes := p.options.Tolerance; {
	case told.Verdict != Unchecked || told.Off <= 0:
	case told.Off <= passes:
		told.Verdict, told.What = Holds, fmt.Sprintf("%s; --tolerance %g lets them pass", told.What, passes)
	default:
		told.What += fmt.Sprintf("; --tolerance %.1g would let them pass", 2*told.Off)
	}
	p.add(LinkUpdate, of, told.Verdict, "%s", told.What)
	return ctx.Err()
}
