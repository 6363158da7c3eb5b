package client_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

func connect(t *testing.T, url string, options ...client.Option) *client.Client {
	t.Helper()
	c, err := client.Connect(t.Context(), url, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

// prompt is a group of two small samples.
func prompt(uid schemas.UID, change ...func(*schemas.Prompt)) *schemas.Prompt {
	p := &schemas.Prompt{
		Prompt: "a red fox", UID: uid, GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(2))},
		Reward:        []schemas.RewardSpec{{Name: "synthetic"}},
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func publish(t *testing.T, c *client.Client, run schemas.Run, p *schemas.Prompt) {
	t.Helper()
	if _, err := c.Publish(t.Context(), run, p); err != nil {
		t.Fatalf("publish %s: %v", p.UID, err)
	}
}

// groups reads n groups of a run behind a cursor.
func groups(t *testing.T, c *client.Client, run schemas.Run, after client.Cursor, n int) []*client.Group {
	t.Helper()
	var out []*client.Group
	for g, err := range c.Groups(t.Context(), run, after) {
		if err != nil {
			t.Fatalf("groups of %s after %q: %v", run, after, err)
		}
		if out = append(out, g); len(out) == n {
			break
		}
	}
	return out
}

func TestConnect_Errors(t *testing.T) {
	t.Parallel()
	p := newPipeline(t, "s3cret")
	bare, err := natsd.Start(t.Context(), natsd.Options{
		StoreDir: t.TempDir(), Listen: "127.0.0.1:0", Log: zerolog.Nop(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bare.Close() })
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = nobody.Close()
	briefly := client.WithConnectTimeout(time.Millisecond)
	for _, test := range []struct {
		name    string
		url     string
		options []client.Option
		is      error
		says    string
	}{
		{"the token", p.url, []client.Option{client.WithToken("s3cret")}, nil, ""},
		{"no token", p.url, nil, client.ErrUnauthorized, ""},
		{"another token", p.url, []client.Option{client.WithToken("secret")}, client.ErrUnauthorized, ""},
		{"nobody there", "nats://" + nobody.Addr().String(), []client.Option{briefly}, client.ErrUnreachable, nobody.Addr().String()},
		{"no streams", bare.ClientURL(), nil, client.ErrNoPipeline, "is missing"},
		{"no such authority", bare.ClientURL(), []client.Option{client.WithCA("testdata/none.pem")}, nil, "none.pem"},
		{"no such credentials", p.url, []client.Option{client.WithCredentials("testdata/none.creds")}, nil, "none.creds"},
		{"token and credentials", p.url, []client.Option{client.WithToken("s3cret"), client.WithCredentials("x.creds")}, nil, "token: "},
		{"half a certificate", p.url, []client.Option{client.WithCertificate("cert.pem", "")}, nil, "tls_cert: "},
		{"no address", "", nil, nil, "url: "},
	} {
		var c *client.Client
		var err error
		// What it waits for does not come; it takes a while to know what is missing.
		for patience := time.Second; ; patience *= 4 {
			ctx, stop := context.WithTimeout(t.Context(), patience)
			if !errors.Is(test.is, client.ErrNoPipeline) {
				ctx = t.Context()
			}
			c, err = client.Connect(ctx, test.url, test.options...)
			stop()
			if !errors.Is(err, client.ErrNoPipeline) || strings.Contains(err.Error(), test.says) ||
				patience > time.Minute {
				break
			}
		}
		if err == nil {
			if err := c.Close(); err != nil {
				t.Errorf("%s: close: %v", test.name, err)
			}
		}
		if (err == nil) != (test.is == nil && test.says == "") || test.is != nil && !errors.Is(err, test.is) ||
			err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v; want %v, saying %q", test.name, err, test.is, test.says)
		}
		if strings.Contains(fmt.Sprint(err), "s3cret") {
			t.Errorf("%s: %v shows the token", test.name, err)
		}
	}
}

// A reader that is killed after any group goes on with the next, over other runs' groups,
// what strangers store, and a restart of its own connection.
func TestGroups_ExactlyOnce(t *testing.T) {
	t.Parallel()
	p := newPipeline(t, "")
	publisher := connect(t, p.url)
	var want []schemas.UID
	for i := range 4 {
		uid := schemas.UID(fmt.Sprintf("g%d", i))
		want = append(want, uid)
		publish(t, publisher, "mine", prompt(uid))
		publish(t, publisher, "other", prompt(uid))
		if err := p.Conn().Publish(schemas.AdvantageSubject("mine", "garbage-"+uid), []byte("\xc1")); err != nil {
			t.Fatal(err)
		}
	}
	var got []schemas.UID
	var cursor client.Cursor
	for range want {
		c, err := client.Connect(t.Context(), p.url)
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range groups(t, c, "mine", cursor, 1) {
			if g.Run != "mine" || g.Status != schemas.StatusComplete || len(g.Members) != 2 {
				t.Errorf("group %+v", g)
			}
			got, cursor = append(got, g.UID), g.Cursor
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	all := groups(t, publisher, "mine", "", len(want))
	for i, g := range all {
		if g.UID != got[i] {
			t.Errorf("in one go %s is number %d, one by one %s", g.UID, i, got[i])
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("read %v one by one, want each of %v once", got, want)
	}
	// Nothing is behind the last cursor until a group closes.
	publish(t, publisher, "mine", prompt("late"))
	if g := groups(t, publisher, "mine", cursor, 1); g[0].UID != "late" {
		t.Errorf("behind the last cursor is %s, want late", g[0].UID)
	}
}

func TestGroups_RefusesWhatItCannotContinue(t *testing.T) {
	t.Parallel()
	p := newPipeline(t, "")
	c := connect(t, p.url)
	for _, uid := range []schemas.UID{"a", "b", "c"} {
		publish(t, c, "r", prompt(uid))
	}
	read := groups(t, c, "r", "", 3)
	refusal := func(run schemas.Run, after client.Cursor) error {
		for _, err := range c.Groups(t.Context(), run, after) {
			return err
		}
		return nil
	}
	for _, after := range []client.Cursor{"7", "a@b", read[0].Cursor + "0"} {
		if err := refusal("r", after); !errors.Is(err, client.ErrCursor) {
			t.Errorf("after %q: %v; want ErrCursor", after, err)
		}
	}
	if err := refusal("r.*", ""); err == nil || !strings.HasPrefix(err.Error(), "run: ") {
		t.Errorf("run r.*: %v; want a refusal", err)
	}
	stream, err := p.JetStream().Stream(t.Context(), schemas.StreamAdvantages)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context(), jetstream.WithPurgeKeep(1)); err != nil {
		t.Fatal(err)
	}
	if err := refusal("r", read[0].Cursor); !errors.Is(err, client.ErrEvicted) {
		t.Errorf("the group after it is gone: %v; want ErrEvicted", err)
	}
	if left := groups(t, c, "r", "", 1); left[0].UID != read[2].UID {
		t.Errorf("left is %s, want %s", left[0].UID, read[2].UID)
	}
}

// Latents are the states of the steps as they were stored, whatever the stored type.
func TestClient_Latents(t *testing.T) {
	t.Parallel()
	p := newPipeline(t, "")
	c := connect(t, p.url)
	states := map[string]map[int64][]float32{}
	for _, dtype := range []string{"F32", "F16", "BF16"} {
		publish(t, c, schemas.Run(dtype), prompt("fox", func(p *schemas.Prompt) {
			p.Seed, p.NumInferenceSteps, p.Rollout.LatentsDType = new(int64(3)), new(int64(3)), dtype
			p.Rollout.ReturnStepIndices = []int64{0, 1, 3}
		}))
		groups(t, c, schemas.Run(dtype), "", 1)
		tr, err := c.Trajectory(t.Context(), schemas.Run(dtype), "fox", 1)
		if err != nil {
			t.Fatal(err)
		}
		latents, err := c.Latents(t.Context(), tr)
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.Sorted(maps.Keys(latents)); !slices.Equal(got, []int64{0, 1, 3}) {
			t.Fatalf("%s: states %v, want those that were asked for", dtype, got)
		}
		for index, x := range latents {
			if len(x) != int(tr.LatentsShape[0]*tr.LatentsShape[1]) {
				t.Errorf("%s: state %d has %d elements; want shape %v", dtype, index, len(x), tr.LatentsShape)
			}
			for i, v := range x {
				bits := math.Float32bits(v)
				if math.IsNaN(float64(v)) || dtype == "BF16" && bits&0xffff != 0 || dtype == "F16" && bits&0x1fff != 0 {
					t.Fatalf("%s: element %d of state %d is %v, no value of that type", dtype, i, index, v)
				}
			}
		}
		states[dtype] = latents
	}
	// The first state is the same noise, rounded to the stored type.
	for i, x := range states["F32"][0] {
		for dtype, step := range map[string]float64{"F16": 1. / (1 << 11), "BF16": 1. / (1 << 8)} {
			if y := states[dtype][0][i]; math.Abs(float64(y-x)) > step*math.Abs(float64(x))+1e-7 {
				t.Fatalf("element %d of x_T is %v in F32, %v in %s", i, x, y, dtype)
			}
		}
	}
}

func TestClient_Errors(t *testing.T) {
	t.Parallel()
	p := newPipeline(t, "")
	c := connect(t, p.url)
	ctx := t.Context()

	t.Run("refused", func(t *testing.T) {
		_, err := c.Publish(ctx, "r", prompt("no", func(p *schemas.Prompt) { p.Reward[0].Name = "beauty" }))
		refused, ok := errors.AsType[*client.RefusedError](err)
		if !ok || refused.Code == "" || !strings.Contains(refused.Reason, "beauty") {
			t.Errorf("%v; want a refusal that names beauty", err)
		}
		_, dry := c.Try(ctx, "r", prompt("no", func(p *schemas.Prompt) { p.Reward[0].Name = "beauty" }))
		if dry == nil || dry.Error() != err.Error() {
			t.Errorf("tried %v, published %v", dry, err)
		}
		if r, err := c.Try(ctx, "r", prompt("tried")); err != nil || !r.Accepted {
			t.Errorf("tried: %+v, %v", r, err)
		}
	})
	t.Run("no answer", func(t *testing.T) {
		b := newStreams(t)
		ctx, stop := context.WithCancel(ctx)
		answer := make(chan error, 1)
		go func() {
			_, err := client.New(b.Bus).Publish(ctx, "r", prompt("quiet"))
			answer <- err
		}()
		for _, err := range b.Read(t.Context(), schemas.StreamPrompts, nil, bus.ReadOptions{Live: true}) {
			if err != nil {
				t.Error(err)
			}
			break // it is stored
		}
		stop()
		if err := <-answer; !errors.Is(err, client.ErrNoAnswer) || !errors.Is(err, context.Canceled) {
			t.Errorf("%v; want ErrNoAnswer, and why it did not wait longer", err)
		}
		if _, err := client.New(b.Bus).Try(t.Context(), "r", prompt("quiet")); !errors.Is(err, client.ErrNoAnswer) {
			t.Errorf("tried: %v; want ErrNoAnswer", err)
		}
	})
	t.Run("not found", func(t *testing.T) {
		if _, err := c.Trajectory(ctx, "r", "nobody", 0); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("%v; want ErrNotFound", err)
		}
		absent := &schemas.Trajectory{Media: []schemas.Medium{{
			Kind: schemas.KindImage,
			Ref:  &schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.Repeat("0", 64), Size: 1},
		}}}
		if _, err := c.Medium(ctx, absent, schemas.KindImage); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("image: %v; want ErrNotFound", err)
		}
		if _, err := c.Medium(ctx, &schemas.Trajectory{Outcome: schemas.Outcome{StopReason: schemas.StopFailed}},
			schemas.KindImage); !errors.Is(err, client.ErrNoMedium) {
			t.Errorf("image: %v; want ErrNoMedium", err)
		}
	})
	t.Run("closed", func(t *testing.T) {
		gone, err := client.Connect(ctx, p.url)
		if err != nil {
			t.Fatal(err)
		}
		if err := gone.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := gone.Publish(ctx, "r", prompt("late")); !errors.Is(err, client.ErrClosed) &&
			!errors.Is(err, nats.ErrConnectionClosed) {
			t.Errorf("%v; want ErrClosed", err)
		}
	})
}

func TestClient_WhatIsStored(t *testing.T) {
	t.Parallel()
	p := newPipeline(t, "")
	c := connect(t, p.url)
	ctx := t.Context()

	t.Run("judged", func(t *testing.T) {
		publish(t, c, "r", prompt("judged",
			func(p *schemas.Prompt) { p.Reward = []schemas.RewardSpec{{Name: "external"}} }))
		give := func(value float64) error {
			return c.Verdict(ctx, &schemas.Verdict{
				Run: "r", UID: "judged", Name: "external", Value: &value, At: time.Now().UnixNano(),
			})
		}
		if err := errors.Join(give(0.5), give(0.5)); err != nil {
			t.Errorf("the same twice: %v", err)
		}
		if err := give(0.25); !errors.Is(err, client.ErrJudged) || !strings.Contains(err.Error(), "0.5") {
			t.Errorf("%v; want ErrJudged with the first value", err)
		}
	})
	t.Run("corrupt", func(t *testing.T) {
		publish(t, c, "corrupt", prompt("fox"))
		groups(t, c, "corrupt", "", 1)
		tr, err := c.Trajectory(ctx, "corrupt", "fox", 0)
		if err != nil {
			t.Fatal(err)
		}
		data, err := c.Medium(ctx, tr, schemas.KindImage)
		if err != nil || !strings.HasPrefix(string(data), "\x89PNG") {
			t.Errorf("image of %d bytes, %v; want a PNG", len(data), err)
		}
		tr.Steps[1].Digest = tr.Steps[0].Digest
		if _, err := c.Steps(ctx, tr); !errors.Is(err, client.ErrCorrupt) {
			t.Errorf("%v; want ErrCorrupt", err)
		}
	})
}
