package natsd_test

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/natsd"
)

// holdStore, set to a store directory, makes this test binary a process that keeps a
// server on it until it is killed.
const holdStore = "NATSD_TEST_HOLD_STORE"

func TestMain(m *testing.M) {
	if dir := os.Getenv(holdStore); dir != "" {
		if _, err := natsd.Start(context.Background(), natsd.Options{
			StoreDir: dir, Listen: "127.0.0.1:0", Token: "secret",
		}); err != nil {
			_, _ = os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		select {}
	}
	goleak.VerifyTestMain(m)
}

func start(t *testing.T, o natsd.Options) *natsd.Server {
	t.Helper()
	s, err := natsd.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func inProcess(t *testing.T, s *natsd.Server) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(s.InProcess()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func TestStart_inProcessOnly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "when missing")
	s := start(t, natsd.Options{StoreDir: dir})
	if s.ClientURL() != "" {
		t.Errorf("listens on %s unasked", s.ClientURL())
	}
	nc := inProcess(t, s)
	if nc.MaxPayload() != 1<<20 {
		t.Errorf("max payload %d, want 1 MiB", nc.MaxPayload())
	}
	info, ok := natsd.Running(dir)
	if !ok || info.PID != os.Getpid() || info.URL != "" {
		t.Errorf("running: got %+v, %v", info, ok)
	}
}

// Each of many samplers follows the same bucket.
func TestStart_manyConsumers(t *testing.T) {
	js, err := jetstream.New(inProcess(t, start(t, natsd.Options{StoreDir: t.TempDir()})))
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1100 {
		if _, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{MemoryStorage: true}); err != nil {
			t.Fatalf("consumer %d: %v", i+1, err)
		}
	}
}

func TestStart_storeSurvivesARestart(t *testing.T) {
	dir := t.TempDir()
	for i := range 3 {
		s, err := natsd.Start(t.Context(), natsd.Options{StoreDir: dir, SyncAlways: i == 1})
		if err != nil {
			t.Fatal(err)
		}
		nc, err := nats.Connect("", nats.InProcessServer(s.InProcess()))
		if err != nil {
			t.Fatal(err)
		}
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		stream, err := js.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		if err != nil {
			t.Fatal(err)
		}
		if got := stream.CachedInfo().State.Msgs; got != uint64(i) {
			t.Errorf("start %d: %d messages stored, want %d", i, got, i)
		}
		if _, err := js.Publish(t.Context(), "s", []byte("x")); err != nil {
			t.Fatal(err)
		}
		nc.Close()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("second close: %v", err)
		}
		if _, ok := natsd.Running(dir); ok {
			t.Error("running after close")
		}
		if _, err := os.Stat(filepath.Join(dir, "meander.json")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("meander.json after close: %v", err)
		}
	}
}

func TestStart_token(t *testing.T) {
	dir := t.TempDir()
	s := start(t, natsd.Options{StoreDir: dir, Listen: "127.0.0.1:0", Token: "secret"})
	inProcess(t, s) // needs none
	for _, token := range []string{"", "guess", "secret "} {
		nc, err := nats.Connect(s.ClientURL(), nats.Token(token))
		if !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("token %q: got %v, want a refusal", token, err)
		}
		if err == nil {
			nc.Close()
		}
	}
	info, ok := natsd.Running(dir)
	if !ok || info.URL != s.ClientURL() || info.Token != "secret" {
		t.Errorf("running: got %+v, %v", info, ok)
	}
	stat, err := os.Stat(filepath.Join(dir, "meander.json"))
	if err != nil || stat.Mode().Perm() != 0o600 {
		t.Errorf("the file with the token has mode %v, %v; want 0600", stat.Mode(), err)
	}
	nc, err := nats.Connect(info.URL, nats.Token(info.Token))
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
}

func TestStart_storeInUse(t *testing.T) {
	dir := t.TempDir()
	s := start(t, natsd.Options{StoreDir: dir, Listen: "127.0.0.1:0"})
	_, err := natsd.Start(t.Context(), natsd.Options{StoreDir: dir})
	inUse, ok := errors.AsType[*natsd.InUseError](err)
	if !ok || inUse.Holder.PID != os.Getpid() || inUse.Holder.URL != s.ClientURL() ||
		!strings.Contains(err.Error(), s.ClientURL()) {
		t.Errorf("got %v", err)
	}
}

// What was promised to streams stays so when the store has less room at the next start: the
// server starts, says so, and takes lower limits and small streams.
func TestStart_LessRoom(t *testing.T) {
	dir := t.TempDir()
	var log strings.Builder
	begin := func(room int64) (*natsd.Server, jetstream.JetStream) {
		t.Helper()
		s := start(t, natsd.Options{
			StoreDir: dir, Listen: "127.0.0.1:0", Token: "secret", MaxFileStore: room,
			Log: zerolog.New(&log).Level(zerolog.WarnLevel),
		})
		js, err := jetstream.New(inProcess(t, s))
		if err != nil {
			t.Fatal(err)
		}
		return s, js
	}
	large := jetstream.StreamConfig{Name: "LARGE", Subjects: []string{"large"}, MaxBytes: 512 << 20}
	s, js := begin(1 << 30)
	if _, err := js.CreateStream(t.Context(), large); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if log.Len() > 0 {
		t.Errorf("with room: %s", log.String())
	}
	_, js = begin(256 << 20)
	if !strings.Contains(log.String(), "the store has less room than its streams were promised") {
		t.Errorf("without room: %s", log.String())
	}
	large.MaxBytes = 400 << 20
	if _, err := js.UpdateStream(t.Context(), large); err != nil {
		t.Errorf("a lower limit: %v", err)
	}
	small := jetstream.StreamConfig{Name: "SMALL", Subjects: []string{"small"}, MaxBytes: 1 << 20}
	if _, err := js.CreateStream(t.Context(), small); err != nil {
		t.Errorf("a small stream: %v", err)
	}
}

// A killed server leaves its file, but not its lock.
func TestRunning_afterAKill(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holdStore+"="+dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var info natsd.Info
	until(t, "the server runs", func() bool { info, _ = natsd.Running(dir); return info.URL != "" })
	if info.PID != cmd.Process.Pid || info.URL == "" || info.Token != "secret" {
		t.Errorf("running: got %+v, want process %d", info, cmd.Process.Pid)
	}
	if _, err := natsd.Start(t.Context(), natsd.Options{StoreDir: dir}); !errors.As(err, new(*natsd.InUseError)) {
		t.Errorf("start on a store in use: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if _, err := os.Stat(filepath.Join(dir, "meander.json")); err != nil {
		t.Errorf("a killed server leaves its file: %v", err)
	}
	if info, ok := natsd.Running(dir); ok {
		t.Errorf("running after a kill: %+v", info)
	}
	start(t, natsd.Options{StoreDir: dir})
	if info, ok := natsd.Running(dir); !ok || info.PID != os.Getpid() {
		t.Errorf("taken over: got %+v, %v", info, ok)
	}
}

func TestRunning_nothingThere(t *testing.T) {
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "missing")} {
		if info, ok := natsd.Running(dir); ok {
			t.Errorf("%s: got %+v", dir, info)
		}
	}
}

func TestStart_refuses(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		options natsd.Options
		want    string
	}{
		"no store":       {natsd.Options{}, "store_dir"},
		"store is file":  {natsd.Options{StoreDir: file}, "not a directory"},
		"port in use":    {natsd.Options{StoreDir: t.TempDir(), Listen: busy.Addr().String()}, "address already in use"},
		"no port":        {natsd.Options{StoreDir: t.TempDir(), Listen: "127.0.0.1"}, "missing port"},
		"bad port":       {natsd.Options{StoreDir: t.TempDir(), Listen: "127.0.0.1:x"}, "port"},
		"huge payload":   {natsd.Options{StoreDir: t.TempDir(), MaxPayload: 1 << 30}, "max_payload"},
		"negative sync":  {natsd.Options{StoreDir: t.TempDir(), SyncInterval: -1}, "sync_interval"},
		"negative store": {natsd.Options{StoreDir: t.TempDir(), MaxFileStore: -1}, "max_file_store"},
	} {
		s, err := natsd.Start(t.Context(), test.options)
		if err == nil {
			_ = s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
	// A failed start frees the store.
	dir := t.TempDir()
	if _, err := natsd.Start(t.Context(), natsd.Options{StoreDir: dir, Listen: busy.Addr().String()}); err == nil {
		t.Fatal("started on a busy port")
	}
	start(t, natsd.Options{StoreDir: dir})
}

func TestStart_storeNotWritable(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("root may write everywhere")
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o500); err != nil {
		t.Fatal(err)
	}
	if _, err := natsd.Start(t.Context(), natsd.Options{StoreDir: dir}); !errors.Is(err, os.ErrPermission) {
		t.Errorf("got %v, want a permission error", err)
	}
}

// A file where the server wants a folder: its own complaint comes back, and the
// process lives.
func TestStart_serverFails(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "jetstream"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := natsd.Start(t.Context(), natsd.Options{StoreDir: dir, Log: zerolog.Nop()})
	if err == nil || !strings.Contains(err.Error(), "JetStream") {
		t.Errorf("got %v, want the server's complaint about JetStream", err)
	}
}

func TestStart_cancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s, err := natsd.Start(ctx, natsd.Options{StoreDir: t.TempDir(), Listen: "127.0.0.1:0"})
	if err == nil {
		_ = s.Close()
		t.Error("started with a context that had ended")
	}
}
