package command

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// connected is a connection to the store of this folder.
func connected(t *testing.T) *connection {
	t.Helper()
	conn := joined(t)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// joined is a connection to the store of this folder, which the caller closes.
func joined(t *testing.T) *connection {
	t.Helper()
	conn, err := (&app{store: "meander-data", logLevel: "error"}).connect(t.Context(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// storedEvents are the events of r1 by their stored subjects, from an export; requests are work and no events.
func storedEvents(t *testing.T) map[string][]byte {
	t.Helper()
	var file bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), connected(t).Bus, "r1", &file); err != nil {
		t.Fatal(err)
	}
	stored := map[string][]byte{}
	for e, err := range export.ReadArchive(&file) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Blob == "" && e.Stream != schemas.StreamRequests {
			stored[e.Subject] = e.Data
		}
	}
	return stored
}

// A run is played to stdout: all events, in the order of their times, with their bytes where these are asked for.
func TestReplay_Print(t *testing.T) {
	inStore(t)
	lines := linesOf(t, expect(t, exitOK, "as fast as they are taken", "runs", "replay", "r1", "--speed", "max",
		"--json", "--bytes"))
	want, last := storedEvents(t), 0.0
	for _, e := range lines {
		data, err := base64.StdEncoding.DecodeString(e["data"].(string))
		if err != nil || !bytes.Equal(data, want[e["subject"].(string)]) {
			t.Errorf("%s: %v, or other bytes than are stored", e["subject"], err)
		}
		delete(want, e["subject"].(string))
		if at := e["time"].(float64); at < last || e["event"] == nil {
			t.Errorf("%v is before what it follows, or empty", e)
		} else {
			last = at
		}
	}
	if len(want) > 0 || len(lines) < 14 {
		t.Errorf("%d events were played, and not %v", len(lines), want)
	}
	text := expect(t, exitOK, "3 events in ", "runs", "replay", "r1", "--kinds", "reward,advantage", "--max-pause",
		"1ns")
	if strings.Count(text, "  reward ") != 2 || strings.Count(text, "  advantage ") != 1 {
		t.Errorf("printed\n%s", text)
	}
	// The file of an archive has the same events, and needs no store.
	file := filepath.Join(t.TempDir(), "r1.tar")
	expect(t, exitOK, "", "runs", "export", "r1", "--out", file)
	t.Chdir(t.TempDir())
	again := linesOf(t, expect(t, exitOK, "", "runs", "replay", file, "--speed", "max", "--json", "--bytes"))
	if !reflect.DeepEqual(again, lines) {
		t.Errorf("of the file %d events were played, or others; want %d", len(again), len(lines))
	}
	expect(t, exitFailed, "no such file", "runs", "replay", "none.tar")
	for _, c := range []struct {
		says string
		args []string
	}{
		{`--speed: "0"; must be max or a number above 0`, []string{"r1", "--speed", "0"}},
		{`--speed: "NaN"; must be max`, []string{"r1", "--speed", "NaN"}},
		{`--kinds: "request"; must be one of prompt`, []string{"r1", "--kinds", "request"}},
		{"--max-pause: -1s; must not be negative", []string{"r1", "--max-pause", "-1s"}},
		{`--subject: "mdr.v1"; must be "replay"`, []string{"r1", "--subject", "mdr.v1"}},
		{"--to: is for --subject", []string{"r1", "--to", "nats://127.0.0.1"}},
		{"--json, --bytes: are for events that are printed", []string{"r1", "--subject", "replay", "--json"}},
		{"--bytes: is for --json", []string{"r1", "--bytes"}},
	} {
		expect(t, exitUsage, c.says, append([]string{"runs", "replay"}, c.args...)...)
	}
	expect(t, exitFailed, "no events of the kinds batch are stored", "runs", "replay", file, "--kinds", "batch")
}

// A run of which nothing is stored is no run to play.
func TestReplay_None(t *testing.T) {
	inStore(t)
	expect(t, exitFailed, "nothing is stored of it", "runs", "replay", "none")
}

// stopper is stdout of a command that is interrupted once it has said something.
type stopper struct {
	text
	stop context.CancelFunc
}

func (s *stopper) Write(p []byte) (int, error) {
	defer s.stop()
	return s.text.Write(p)
}

// An interrupted replay ends in its pause, and says how far it came.
func TestReplay_Interrupted(t *testing.T) {
	inStore(t)
	ctx, stop := context.WithCancel(t.Context())
	out, errs := &stopper{stop: stop}, &text{}
	status := Execute(ctx, []string{"runs", "replay", "r1", "--speed", "0.000000000001"}, strings.NewReader(""), out,
		errs)
	if status != exitInterrupted || strings.Count(out.String(), "\n") != 1 ||
		!strings.Contains(errs.String(), "after 1 of ") {
		t.Errorf("status %d\n%s%s", status, out, errs)
	}
}

// messagesOf is how many messages each stream has of events and work.
func messagesOf(t *testing.T) string {
	t.Helper()
	n := map[string]any{}
	for _, s := range linesOf(t, expect(t, exitOK, "", "streams", "--json")) {
		if name := s["name"].(string); strings.HasPrefix(name, "MDR_") {
			n[name] = s["messages"]
		}
	}
	return fmt.Sprint(n)
}

// A run is published on subjects of its own, byte for byte, while services work on the server: they take none of it.
func TestReplay_Publish(t *testing.T) {
	inStore(t)
	serving(t, "--model", "synthetic")
	want := storedEvents(t)
	before := messagesOf(t)
	nc := connected(t).Conn()
	heard, err := nc.SubscribeSync("replay.night.>")
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	expect(t, exitOK, "without pauses", "runs", "replay", "r1", "--speed", "max", "--subject", "replay.night")
	for range want {
		m, err := heard.NextMsgWithContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		subject := m.Header.Get("Nats-Subject")
		if m.Subject != strings.Replace(subject, "mdr.v1.", "replay.night.", 1) ||
			!bytes.Equal(m.Data, want[subject]) ||
			m.Header.Get("Nats-Time-Stamp") == "" || m.Header.Get("Nats-Msg-Id") != "" {
			t.Errorf("%s of %s: %v, %d bytes", m.Subject, subject, m.Header, len(m.Data))
		}
	}
	if m, err := heard.NextMsgWithContext(t.Context()); err != nil || m.Subject != "replay.night.end" ||
		len(m.Data) > 0 || m.Header != nil {
		t.Errorf("the last message: %+v, %v", m, err)
	}
	if after := messagesOf(t); after != before {
		t.Errorf("the streams have %s messages; had %s", after, before)
	}
	if err := heard.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	expect(t, exitFailed, "nobody listened on replay.night.>", "runs", "replay", "r1", "--speed", "max", "--subject",
		"replay.night")
	ended, err := nc.SubscribeSync("replay.night.end")
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	expect(t, exitFailed, "nobody listened", "runs", "replay", "r1", "--speed", "max", "--subject", "replay.night")
	if m, err := ended.NextMsgWithContext(t.Context()); err != nil || !strings.Contains(m.Header.Get(headerReplayError),
		"nobody listened") {
		t.Errorf("the last message of a replay that failed: %+v, %v", m, err)
	}
	// On another server.
	other := bustest.Bare(t, bustest.TCP)
	if heard, err = other.Conn().SubscribeSync("replay.advantage.>"); err == nil {
		err = other.Conn().Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	unheard := fmt.Sprintf("%d of %d events were heard by nobody", len(want)-1, len(want))
	expect(t, exitOK, unheard, "runs", "replay", "r1", "--speed", "max", "--subject", "replay", "--to",
		other.Server.ClientURL())
	if m, err := heard.NextMsgWithContext(t.Context()); err != nil ||
		!bytes.Equal(m.Data, want["mdr.v1.advantage.r1.p"]) {
		t.Errorf("%+v, %v", m, err)
	}
	expect(t, exitFailed, nats.ErrNoServers.Error(), "runs", "replay", "r1", "--subject", "replay", "--to",
		"nats://127.0.0.1:1")
}
