package natsd_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sys/unix"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
)

// member joins dir, serving or reading, and leaves it at the end of the test.
func member(t *testing.T, dir string, serves bool, change ...func(*natsd.MemberOptions)) *natsd.Member {
	t.Helper()
	opts := natsd.MemberOptions{ServesPipeline: serves, Options: natsd.Options{
		StoreDir: dir, Listen: "127.0.0.1:0", Token: fmt.Sprintf("token-%d", time.Now().UnixNano()),
	}}
	for _, f := range change {
		f(&opts)
	}
	m, err := natsd.Join(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { leave(t, m) })
	return m
}

func leave(t *testing.T, m *natsd.Member) {
	t.Helper()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// through connects by way of a member; the channel has each connection made again.
func through(t *testing.T, m *natsd.Member) (*nats.Conn, <-chan struct{}) {
	t.Helper()
	again := make(chan struct{}, 100)
	nc, err := nats.Connect("", nats.InProcessServer(m), nats.TokenHandler(m.Token), nats.MaxReconnects(-1),
		nats.ReconnectWait(20*time.Millisecond),
		nats.IgnoreAuthErrorAbort(), nats.ReconnectHandler(func(*nats.Conn) { again <- struct{}{} }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc, again
}

// until waits for what a server does by itself.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	bustest.Until(t, what, func() error {
		if !is() {
			return errors.New("not yet")
		}
		return nil
	})
}

func TestMember_takesOver(t *testing.T) {
	dir := t.TempDir()
	first := member(t, dir, true)
	second := member(t, dir, true)
	third := member(t, dir, false)
	if !first.Owns() || second.Owns() || third.Owns() {
		t.Fatalf("owners: %v, %v, %v; want the first alone", first.Owns(), second.Owns(), third.Owns())
	}
	nc, again := through(t, third)
	leave(t, first)
	bustest.Receive(t, "the connection is there again", again)
	until(t, "the second, which serves, has the store", second.Owns)
	if third.Owns() {
		t.Error("the reader took the store before the one that serves")
	}
	if second.Unfinished() {
		t.Error("work of one that left in order is unfinished")
	}
	until(t, "the connection is the second's", func() bool { return nc.FlushTimeout(time.Second) == nil })
	leave(t, second)
	until(t, "the reader has the store", third.Owns)
	until(t, "the connection is the reader's own", func() bool { return nc.FlushTimeout(time.Second) == nil })
}

// A reader that has the store gives it to a process that comes to serve.
func TestMember_readerGivesWay(t *testing.T) {
	dir := t.TempDir()
	reader := member(t, dir, false)
	if !reader.Owns() {
		t.Fatal("the only member has no server")
	}
	_, again := through(t, reader)
	server := member(t, dir, true)
	if !server.Owns() || reader.Owns() {
		t.Fatalf("owners: server %v, reader %v", server.Owns(), reader.Owns())
	}
	bustest.Receive(t, "the connection is there again", again)
}

func TestMember_serve(t *testing.T) {
	dir := t.TempDir()
	reader := member(t, dir, false)
	ctx, stop := context.WithCancel(t.Context())
	events := make(chan string, 10)
	ended := make(chan error, 1)
	go func() {
		ended <- reader.Serve(ctx, func(ctx context.Context) error {
			events <- "begin"
			<-ctx.Done()
			events <- "end"
			return nil
		})
	}()
	next := func(want string) {
		t.Helper()
		if got := <-events; got != want {
			t.Fatalf("got %s, want %s", got, want)
		}
	}
	next("begin")
	server := member(t, dir, true)
	next("end")
	leave(t, server)
	next("begin")
	stop()
	next("end")
	if err := <-ended; err != nil {
		t.Error(err)
	}
	// An error of what is served ends Serve.
	want := errors.New("no")
	if err := reader.Serve(t.Context(), func(context.Context) error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
}

func TestMember_agrees(t *testing.T) {
	dir := t.TempDir()
	member(t, dir, true, func(o *natsd.MemberOptions) {
		o.Settings = func() map[string]string { return map[string]string{"model": "a"} }
	})
	other := errors.New("another model")
	_, err := natsd.Join(t.Context(), natsd.MemberOptions{
		Options: natsd.Options{StoreDir: dir, Listen: "127.0.0.1:0"}, ServesPipeline: true,
		CheckSettings: func(running natsd.Info) error {
			if running.PID != os.Getpid() || running.Settings["model"] != "a" {
				t.Errorf("runs: %+v", running)
			}
			return other
		},
	})
	if !errors.Is(err, other) {
		t.Errorf("got %v, want %v", err, other)
	}
}

// Right after a kill the dead server's file is there, and somebody else has the lock: the
// file is not believed.
func TestJoin_staleInfo(t *testing.T) {
	dir := t.TempDir()
	leave(t, member(t, dir, true)) // makes the lock files
	for _, claim := range []string{"meander", "pipeline"} {
		if err := os.WriteFile(filepath.Join(dir, claim+".json"), []byte(`{"pid":1,"url":"nats://127.0.0.1:1"}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(filepath.Join(dir, "meander.lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	joined := make(chan *natsd.Member, 1)
	go func() {
		m, err := natsd.Join(t.Context(), natsd.MemberOptions{
			Options: natsd.Options{StoreDir: dir, Listen: "127.0.0.1:0"}, ServesPipeline: true,
		})
		if err != nil {
			t.Error(err)
		}
		joined <- m
	}()
	until(t, "the pipeline is taken", func() bool {
		by, taken := natsd.Pipeline(dir)
		return taken && by.PID == os.Getpid()
	})
	if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	m := bustest.Receive(t, "the member that joins", joined)
	if m == nil {
		return
	}
	defer leave(t, m)
	if !m.Owns() || !m.Unfinished() {
		t.Errorf("owns %v, unfinished %v; want both", m.Owns(), m.Unfinished())
	}
}

// Looking at a store does not keep it from being opened.
func TestStart_whileLookedAt(t *testing.T) {
	dir := t.TempDir()
	ctx, stop := context.WithCancel(t.Context())
	looking := make(chan struct{})
	for range 4 {
		go func() {
			defer func() { looking <- struct{}{} }()
			for ctx.Err() == nil {
				natsd.Pipeline(dir)
				natsd.Running(dir)
			}
		}()
	}
	for range 20 {
		s, err := natsd.Start(t.Context(), natsd.Options{StoreDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	for range 4 {
		<-looking
	}
}
