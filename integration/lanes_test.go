package integration_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// A prompt that refers to a blob which is not there is refused before any sample is asked
// for; requests of which it is gone later fail at once, each for good, and hold up none
// of the others.
func TestLane_MissingLatents(t *testing.T) {
	w := start(t, func(c *config) { c.sampler.Batch, c.sampler.Workers = 4, 1 })
	shape := []int64{schemas.MaxGroupSize, 16, 64}
	gone := schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.Repeat("ab", 32), Size: 4 * shape[0] * shape[1] * shape[2]}
	prompt := &schemas.Prompt{UID: "bad", Prompt: "a red fox", GroupSize: new(shape[0]), InitialLatents: &schemas.Tensor{DType: "F32", Shape: shape, Ref: &gone}}
	receipt, err := w.client.Publish(t.Context(), "r", prompt)
	if err == nil || receipt == nil || receipt.Code != schemas.CodeInvalid || !strings.Contains(receipt.Error, "initial_latents.ref: ") ||
		!strings.Contains(receipt.Error, "not found; must be a blob that was stored before the prompt") {
		t.Fatalf("receipt %+v, %v", receipt, err)
	}

	requests := make(chan *nats.Msg, 16)
	sub, err := w.Conn().ChanSubscribe(schemas.Prefix+"request.r.*.model.*", requests)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.client.Publish(t.Context(), "r", &schemas.Prompt{UID: "model", Prompt: "a red fox", GroupSize: new(int64(1))}); err != nil {
		t.Fatal(err)
	}
	var bad schemas.Request
	if err := schemas.Decode((<-requests).Data, &bad); err != nil {
		t.Fatal(err)
	}
	if err := sub.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	bad.UID, bad.Group.Batch, bad.GroupSize, bad.InitialLatents = "bad", "bad", shape[0], prompt.InitialLatents
	p := w.NewPublisher(1024, 16<<20)
	defer p.Close()
	for i := range shape[0] {
		bad.SampleIndex = i
		if _, err := p.Publish(t.Context(), &bad); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	const good = 4
	for i := range good {
		if _, err := w.client.Publish(t.Context(), "r", &schemas.Prompt{UID: "good" + string(rune('0'+i)), Prompt: "a blue fox", GroupSize: new(int64(2))}); err != nil {
			t.Fatal(err)
		}
	}
	groups := w.advantages(t, "r", 1+good+1)
	for uid, a := range groups {
		want := schemas.StatusComplete
		if uid == "bad" {
			want = schemas.StatusFailed
		}
		if a.Status != want {
			t.Errorf("group %s is %s, want %s", uid, a.Status, want)
		}
	}
	for _, d := range w.dead(t, 1+int(shape[0])) {
		if d.Code != schemas.CodeInvalid || !strings.HasPrefix(d.Reason, "initial_latents.ref: ") {
			t.Fatalf("dead letter of %s: %s: %s", d.OriginalSubject, d.Code, d.Reason)
		}
	}
}

// A prompt that is too long for the model is no matter of trying again; cut when it says
// so, which its trajectories tell.
func TestLane_LongPrompt(t *testing.T) {
	w := start(t, func(c *config) { c.sampler.Model = filepath.Join("..", "pkg", "model", "testdata", "golden", "full") })
	prompt := &schemas.Prompt{
		UID: "long", Prompt: strings.Repeat("a red fox, ", 200), GroupSize: new(int64(2)), Height: new(int64(16)), Width: new(int64(16)),
		NumInferenceSteps: new(int64(2)), TrueCFGScale: new(1.0),
	}
	if _, err := w.client.Publish(t.Context(), "r", prompt); err != nil {
		t.Fatal(err)
	}
	for _, d := range w.dead(t, 2) {
		if d.Code != schemas.CodeInvalid || d.Deliveries > 2 || !strings.Contains(d.Reason, "tokens: want at most 512; shorten it, or set truncate_prompt") {
			t.Errorf("dead letter: %s after %d deliveries: %s", d.Code, d.Deliveries, d.Reason)
		}
	}
	prompt.UID, prompt.TruncatePrompt = "cut", true
	if _, err := w.client.Publish(t.Context(), "r", prompt); err != nil {
		t.Fatal(err)
	}
	for uid, a := range w.advantages(t, "r", 2) {
		if complete := a.Status == schemas.StatusComplete; complete != (uid == "cut") {
			t.Errorf("group %s is %s: %s", uid, a.Status, a.Error)
		}
	}
	tr, err := w.client.Trajectory(t.Context(), "r", "cut", 0)
	if err != nil || !tr.TruncatePrompt || tr.TruncatedTokens < 100 || tr.Prompt != prompt.Prompt {
		t.Errorf("trajectory %+v, %v", tr, err)
	}
}
