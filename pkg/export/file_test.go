package export_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// A process that writes an archive is one of this test, with these in its environment.
const (
	serverVariable = "TEST_ARCHIVE_SERVER"
	fileVariable   = "TEST_ARCHIVE_FILE"
)

func TestMain(m *testing.M) {
	if server := os.Getenv(serverVariable); server != "" {
		b, err := bus.Connect(context.Background(), bus.Config{Name: "export", URL: server}, zerolog.Nop())
		if err == nil {
			_, err = export.WriteArchiveFile(context.Background(), b, "r", os.Getenv(fileVariable))
		}
		fmt.Println("the export was not killed:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// large stores a run of eight steps and eight images of almost 1 MiB, and one image that is gone.
func large(t *testing.T) *bustest.Plane {
	t.Helper()
	p := bustest.New(t, bustest.TCP)
	for i := range int64(8) {
		state := bytes.Repeat([]byte{byte(i)}, 1000<<10)
		step := stepOf("r", "u", i, 0, state)
		made := completed("r", "u", i, refTo(t, step, publish(t, p.Bus, step)))
		ref, err := p.PutBlob(t.Context(), append(state, 1))
		if err != nil {
			t.Fatal(err)
		}
		withImage(made, &ref)
		publish(t, p.Bus, made)
	}
	gone := stepOf("r", "u", 8, 0, make([]byte, 4))
	publish(t, p.Bus, withImage(completed("r", "u", 8, refTo(t, gone, publish(t, p.Bus, gone))), nil))
	return p
}

// killed exports the run in a process of its own, which gets so many bytes of the server and is killed once it has
// saved the state of at least want.
func killed(t *testing.T, p *bustest.Plane, name string, bytes, want int64) {
	t.Helper()
	server, err := url.Parse(p.Server.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		client, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = client.Close() }()
		conn, err := net.Dial("tcp", server.Host)
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		go func() { _, _ = io.CopyN(client, conn, bytes) }()
		_, _ = io.Copy(conn, client) // until the process is gone
	}()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), serverVariable+"=nats://"+l.Addr().String(), fileVariable+"="+name)
	c.Stdout, c.Stderr = os.Stderr, os.Stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill() })
	bustest.Until(t, "a saved state", func() error {
		var state struct{ Bytes int64 }
		data, err := os.ReadFile(name + ".part.json")
		if err == nil {
			err = json.Unmarshal(data, &state)
		}
		if err == nil && state.Bytes < want {
			err = fmt.Errorf("of %d bytes", state.Bytes)
		}
		return err
	})
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err == nil {
		t.Fatal("the export ended")
	}
	if _, err := os.Stat(name); err == nil {
		t.Fatal("half an export has its name")
	}
}

// An export whose process was killed, among the events and then among the blobs, goes on behind what it had, and comes
// to the bytes of one that was not.
func TestWriteFile_Killed(t *testing.T) {
	t.Parallel()
	p := large(t)
	whole, name := filepath.Join(t.TempDir(), "whole.tar"), filepath.Join(t.TempDir(), "r.tar")
	if s, err := export.WriteArchiveFile(t.Context(), p.Bus, "r", whole); err != nil || s.Before != 0 ||
		s.Missing != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	want, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	killed(t, p, name, 6<<20, 4<<20)
	killed(t, p, name, 9<<20, 9<<20)
	// What is stored after the beginning is in neither.
	late := stepOf("r", "u", 9, 0, make([]byte, 4))
	if _, err := p.PublishRaw(t.Context(), late.Subject(), bustest.Encode(t, late), nil, ""); err != nil {
		t.Fatal(err)
	}
	s, err := export.WriteArchiveFile(t.Context(), p.Bus, "r", name)
	if err != nil || s.Before < 9<<20 || s.Before >= s.Bytes || s.Missing != 1 || s.Blobs != 8 {
		t.Fatalf("%+v, %v", s, err)
	}
	got, err := os.ReadFile(name)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v; want the %d of an export that was not killed", len(got), err, len(want))
	}
	if left, err := filepath.Glob(name + ".*"); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// A begun export of another run, of another store, or with other bytes is not gone on with, and stays.
func TestWriteFile_Other(t *testing.T) {
	t.Parallel()
	p := large(t)
	name := filepath.Join(t.TempDir(), "r.tar")
	killed(t, p, name, 6<<20, 4<<20)
	refused := func(b *bus.Bus, run schemas.Run, says string) {
		t.Helper()
		_, err := export.WriteArchiveFile(t.Context(), b, run, name)
		if !errors.Is(err, export.ErrBegun) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want %q", err, says)
		}
	}
	refused(p.Bus, "s", "is of run r")
	refused(bustest.New(t).Bus, "r", "is of another store")
	f, err := os.Open(name + ".part")
	if err == nil {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	refused(p.Bus, "r", "another process writes")
	_ = f.Close()
	f, err = os.OpenFile(name+".part", os.O_RDWR, 0)
	if err == nil {
		_, err = f.WriteAt([]byte{99}, 2<<20)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	refused(p.Bus, "r", "has changed since it was written")
	if err := os.WriteFile(name+".part.json", []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(p.Bus, "r", "remove it")
	if err := os.Remove(name + ".part"); err != nil { // the state alone says nothing
		t.Fatal(err)
	}
	if s, err := export.WriteArchiveFile(t.Context(), p.Bus, "r", name); err != nil || s.Before != 0 {
		t.Errorf("begun again: %+v, %v", s, err)
	}
}

// An export goes on when what it had written is no longer stored, and says so.
func TestWriteFile_Removed(t *testing.T) {
	t.Parallel()
	p := large(t)
	name := filepath.Join(t.TempDir(), "r.tar")
	killed(t, p, name, 6<<20, 4<<20)
	if _, err := p.PurgeSubject(t.Context(), schemas.StreamSteps,
		schemas.Address{Kind: schemas.KindStep, Run: "r"}.Filter()); err != nil {
		t.Fatal(err)
	}
	s, err := export.WriteArchiveFile(t.Context(), p.Bus, "r", name)
	if err != nil || !s.Removed || s.Before < 4<<20 || s.Events[schemas.StreamTrajectories] != 9 {
		t.Errorf("%+v, %v", s, err)
	}
}
