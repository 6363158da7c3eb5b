package command

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/estimate"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// started is what a run was started with. It is stored once; the run id can only be resumed with the same.
type started struct {
	Prompts int `json:"prompts"`
	// Digest covers the prompts, without the model, and without deadlines, because these are relative to now.
	Digest string `json:"digest"`
	// Model is the lane, BaseDigest its checkpoint, and Adapter the digest of the adapter that the flags add.
	Model      schemas.Lane `json:"model,omitempty"`
	BaseDigest string       `json:"base_digest,omitempty"`
	Adapter    string       `json:"adapter,omitempty"`
	Created    int64        `json:"created"`

	mix   bool   // groups that another engine has begun may be finished, see schemas.Policy
	begun string // the checkpoint that the run was begun with, if mix
}

// startedWith returns what this command starts, and what the run was started with before (nil: the run is new). It
// refuses a run that was started with other prompts or another model (a usage error).
func (r *runner) startedWith(ctx context.Context, conn *connection, prompts []prompt,
	plan *estimated,
) (mine, before *started, err error) {
	h := sha256.New()
	for _, p := range prompts {
		body := maps.Clone(p.body)
		delete(body, "deadline")
		data, err := prompt{uid: p.uid, body: body}.encode()
		if err != nil {
			return nil, nil, err
		}
		h.Write(data)
	}
	mine = &started{Prompts: len(prompts), Digest: hex.EncodeToString(h.Sum(nil)), Created: time.Now().UnixNano()}
	if conn.member != nil {
		mine.Model = r.services.Lane()
		if mine.Adapter, err = r.services.adapterDigest(); err != nil {
			return nil, nil, usage(err)
		}
	} else if len(plan.facts.Live) == 1 {
		mine.Model = plan.facts.Live[0]
	}
	mine.mix = conn.serves() && r.services.Sampler.EngineMix
	// A sampler is live before it has announced its model.
	if p := plan.facts.Policy(mine.Model); p != nil && !conn.serves() {
		mine.mix = p.EngineMix
		if slices.Contains(plan.facts.Live, mine.Model) {
			mine.BaseDigest = p.Checkpoint()
		}
	}
	stored, err := conn.Run(ctx, r.id)
	if errors.Is(err, bus.ErrNotFound) {
		return mine, nil, nil
	}
	before = &started{}
	if err == nil {
		if err = json.Unmarshal(stored, before); err != nil {
			err = fmt.Errorf("stored spec of run %q: %w", r.id, err)
		}
	}
	if err == nil {
		err = r.checkResume(before, mine, conn.member == nil)
	}
	if mine.mix {
		mine.begun = before.BaseDigest
	}
	return mine, before, err
}

// checkResume refuses to resume a run that was started with something else (a usage error). At a pipeline elsewhere a
// run without a named model keeps its lane.
func (r *runner) checkResume(before, mine *started, elsewhere bool) error {
	const other = "; use that again, or choose another --run"
	switch {
	case before.Digest != mine.Digest:
		return usage(fmt.Errorf("--run: %q was started with other prompts or settings; "+
			"give the same ones to resume it, or choose another id", r.id))
	case before.Model == "":
		return nil // an older release stored no model
	case before.Model != mine.Model && elsewhere:
		mine.Model, mine.BaseDigest = before.Model, before.BaseDigest
		return nil
	case before.Model != mine.Model:
		return usage(fmt.Errorf("--model: %q; run %q was started with %q%s", mine.Model, r.id, before.Model, other))
	case before.Adapter != mine.Adapter && !elsewhere:
		return usage(fmt.Errorf("--adapter: %s; run %q was started with %s%s", adapterName(mine.Adapter), r.id,
			adapterName(before.Adapter), other))
	}
	return r.sameCheckpoint(fmt.Sprintf("lane %q serves", mine.Model), before.BaseDigest, mine.BaseDigest, mine.mix)
}

// sameCheckpoint refuses a checkpoint other than the one that the run was started with. what says where it is from;
// "" for an unknown checkpoint passes, and so does another engine with mix.
func (r *runner) sameCheckpoint(what, before, mine string, mix bool) error {
	otherEngine := schemas.IsServed(before) || schemas.IsServed(mine)
	if before == "" || mine == "" || before == mine || mix && otherEngine {
		return nil
	}
	if otherEngine {
		return usage(fmt.Errorf("%s %s; run %q was started with what is %s; use that engine again, choose another "+
			"--run, or have this one make the rest with --engine-mix", what, engineOf(mine), r.id,
			engineOf(before)))
	}
	return usage(fmt.Errorf("%s the checkpoint %.16s; run %q was started with %.16s; "+
		"use that again, or choose another --run", what, mine, r.id, before))
}

// engineOf says which engine makes the samples of a checkpoint.
func engineOf(digest string) string {
	if schemas.IsServed(digest) {
		return digest
	}
	return "made by the sampler itself"
}

// adapterName returns the beginning of an adapter's digest, or none.
func adapterName(digest string) string { return cmp.Or(fmt.Sprintf("%.16s", digest), "none") }

// adapterDigest returns a digest of the adapter that the flags add to the checkpoint; "" without one. It fails if the
// adapter cannot be read.
func (s *services) adapterDigest() (string, error) {
	if s.Sampler.Adapter == "" {
		return "", nil
	}
	a, err := lora.Open(s.Sampler.Adapter)
	if err != nil {
		return "", err
	}
	return lora.WeightsDigest("", lora.Weighted{Adapter: a, Weight: s.Sampler.AdapterScale}), nil
}

// awaitModel waits until the sampler of this process has announced its model, and returns the digest of its
// checkpoint. The error is the cause of ctx, or of the server.
func (s *services) awaitModel(ctx context.Context, b *bus.Bus) (string, error) {
	select {
	case <-s.ready:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	p, err := b.Policy(ctx, s.Lane().Of(schemas.TenantMain))
	if err != nil {
		return "", err
	}
	return p.Checkpoint(), nil
}

// pipelineError explains why the pipeline of this process did not start; another checkpoint than the run's is a usage
// error.
func (r *runner) pipelineError(err error) error {
	if other, ok := errors.AsType[*weights.OtherCheckpointError](err); ok {
		return r.sameCheckpoint(fmt.Sprintf("--model: %q is", other.Model), other.Want, other.Has, false)
	}
	return fmt.Errorf("pipeline: %w", err)
}

// claimRun stores what the run was started with, at its first start. Groups that the run has already, from prompts
// that were published otherwise, must be of the same model. If another process has claimed the run for something
// else, it is a usage error.
func (r *runner) claimRun(ctx context.Context, conn *connection) error {
	mine := r.with
	for _, p := range r.given {
		if r.outcomes.Open(p.uid) {
			continue
		}
		g, err := conn.Group(ctx, r.id, p.uid)
		switch {
		case errors.Is(err, bus.ErrNotFound):
		case err != nil:
			return err
		case g.Lane != "" && p.textField("model") != "" && string(g.Lane) != p.textField("model"):
			return usage(fmt.Errorf("--model: %q; group %q of run %q is of %q; choose another --run",
				p.textField("model"), p.uid, r.id, g.Lane))
		default:
			what := fmt.Sprintf("group %q is of another model: lane %q serves", p.uid, g.Lane)
			if err := r.sameCheckpoint(what, g.BaseDigest, p.textField("base_digest"), mine.mix); err != nil {
				return err
			}
		}
	}
	spec, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	stored, created, err := conn.CreateRun(ctx, r.id, spec)
	if err != nil || created {
		return err
	}
	before := &started{} // another process was first
	if err := json.Unmarshal(stored, before); err != nil {
		return fmt.Errorf("stored spec of run %q: %w", r.id, err)
	}
	return r.checkResume(before, mine, conn.member == nil)
}

// textField returns a field of the prompt that is a text; "" if it has none.
func (p prompt) textField(field string) string {
	text, _ := p.body[field].(string)
	return text
}

// nameModel gives prompts without a model the lane that they are for, so that no other model can take them later.
// That is the lane that samplers serve, with its checkpoint; else the lane of a pipeline on this store that is still
// starting; else the only lane that there was.
func (a *app) nameModel(prompts []prompt, f *estimate.Facts) {
	switch running, serves := natsd.Pipeline(a.store); {
	case len(f.Live) == 1:
		nameLane(prompts, f.Live[0], f.Policy(f.Live[0]).Checkpoint())
	case len(f.Live) > 1 || a.nats.URL != "":
	case serves:
		nameLane(prompts, schemas.Lane(model.NameOf(running.Settings["model"])), "")
	case len(f.Policies) == 1:
		nameLane(prompts, f.Policies[0].Lane, "")
	}
}

// nameLane gives prompts without a model a lane, and all prompts of that lane a checkpoint ("": any). Stages name their
// own.
func nameLane(prompts []prompt, lane schemas.Lane, base string) {
	for _, p := range prompts {
		if p.body["stages"] != nil {
			continue
		}
		if p.body["model"] == nil || p.body["model"] == "" {
			p.body["model"] = string(lane)
		}
		if p.body["model"] == string(lane) && p.body["base_digest"] == nil && base != "" {
			p.body["base_digest"] = base
		}
	}
}
