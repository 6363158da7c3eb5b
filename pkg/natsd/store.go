package natsd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// A claim is a lock file of a store with a file beside it that says which process holds the lock. The lock ends with
// the process, in whatever way that ends. The files stay after a kill; when no process holds the lock, they are
// stale.
const (
	serverClaim   = "meander"  // held while a server has the store open
	pipelineClaim = "pipeline" // held while a process serves the store's pipeline, or is about to
)

const (
	// maxInfo bounds what is read of an info file.
	maxInfo = 64 << 10
	// lookPause is the pause before another try to lock, when a reader holds the lock for a moment.
	lookPause = 5 * time.Millisecond
)

// Info says which process has a store open, or serves its pipeline, and how to join it.
type Info struct {
	PID int `json:"pid"`
	// URL is where the server listens; empty: it does not listen.
	URL string `json:"url,omitempty"`
	// Token is what a client must show; empty: none.
	Token string `json:"token,omitempty"`
	// Users: it asks clients for the credentials of a user.
	Users bool `json:"users,omitempty"`
	// Certificate is the certificate of the server, as PEM; empty: it does not use TLS.
	Certificate string `json:"certificate,omitempty"`
	// Settings are the settings of the pipeline.
	Settings map[string]string `json:"settings,omitempty"`
}

// InUseError means that another process has the store open.
type InUseError struct {
	StoreDir string
	// Holder is that process; zero when it has not said who it is.
	Holder Info
}

// Error says which process has the store, as far as it is known.
func (e *InUseError) Error() string {
	switch {
	case e.Holder.PID == 0:
		return fmt.Sprintf("store %q is in use by another process", e.StoreDir)
	case e.Holder.URL == "":
		return fmt.Sprintf("store %q is in use by process %d, which does not listen", e.StoreDir, e.Holder.PID)
	}
	return fmt.Sprintf("store %q is in use by process %d at %s", e.StoreDir, e.Holder.PID, e.Holder.URL)
}

// Running returns which process has the server of a store, and how to reach it; false: none. Commands call it that
// must not join a store. It ignores the info file of a process that was killed.
func Running(storeDir string) (Info, bool) {
	// A server that starts has the lock before it can say where it listens.
	for range 100 {
		info, held := readClaim(storeDir, serverClaim)
		if !held || info.PID != 0 {
			return info, held
		}
		time.Sleep(20 * time.Millisecond)
	}
	return Info{}, true
}

// readClaim returns which process holds a claim, and whether one does. Info is zero if that process has not written
// its info file yet. For a moment after a holder was killed and another one came, Info may name the dead one. A store
// that cannot be read has no holder.
func readClaim(dir, claim string) (Info, bool) {
	f, err := os.Open(filepath.Join(dir, claim+".lock"))
	if err != nil {
		return Info{}, false
	}
	defer func() { _ = f.Close() }() // read-only
	if err := flock(f, unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		return Info{}, false
	}
	info, err := readInfo(dir, claim)
	if err != nil {
		return Info{}, true
	}
	return info, true
}

type heldClaim struct {
	dir, claim string
	lock       *os.File
	// leftByKilled means that the process before ended without a release.
	leftByKilled bool
}

// acquireClaim takes a claim, or returns *InUseError at once if another process holds it. It waits for a process that
// only reads the claim, which locks it for a moment. Other errors are about the files of the store.
func acquireClaim(ctx context.Context, dir, claim string) (*heldClaim, error) {
	f, err := os.OpenFile(filepath.Join(dir, claim+".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	for {
		if err = flock(f, unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) || ctx.Err() != nil {
			break
		}
		if flock(f, unix.LOCK_SH|unix.LOCK_NB) != nil {
			break // another process has it alone
		}
		_ = flock(f, unix.LOCK_UN) // fails on a bad descriptor only
		time.Sleep(lookPause/2 + rand.N(lookPause))
	}
	h := &heldClaim{dir: dir, claim: claim, lock: f}
	if err == nil {
		// A file that is there was left by a process that was killed.
		err = os.Remove(h.infoFile())
		h.leftByKilled = err == nil
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return h, nil
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		inUse := &InUseError{StoreDir: dir}
		if info, readErr := readInfo(dir, claim); readErr == nil {
			inUse.Holder = info
		}
		err = inUse
	} else {
		err = fmt.Errorf("lock store %q: %w", dir, err)
	}
	return nil, errors.Join(err, f.Close())
}

func (h *heldClaim) infoFile() string { return filepath.Join(h.dir, h.claim+".json") }

// release removes the info file and unlocks the claim, so that another process can take it. An error is about the
// files; the lock ends with the process anyway.
func (h *heldClaim) release() error {
	err := os.Remove(h.infoFile())
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	// It is unlocked, not only closed: a process that is being started has the file open until it is another program.
	if unlocking := errors.Join(flock(h.lock, unix.LOCK_UN), h.lock.Close()); unlocking != nil {
		err = errors.Join(err, fmt.Errorf("unlock store %q: %w", h.dir, unlocking))
	}
	return err
}

// flock locks or unlocks a file, and tries again when a signal interrupts it.
func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// writeInfo writes the claim's info file: which process holds it, and how to reach it. It replaces the whole file, so
// that a reader never sees half of it. Only the owner of the store may read it: it has the token.
func (h *heldClaim) writeInfo(info Info) error {
	data, err := json.Marshal(info)
	if err != nil {
		return fmt.Errorf("describe %s: %w", h.claim, err)
	}
	f, err := os.CreateTemp(h.dir, h.claim+".json.*") // mode 0600
	if err != nil {
		return fmt.Errorf("describe %s: %w", h.claim, err)
	}
	_, err = f.Write(append(data, '\n'))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), h.infoFile())
	}
	if err != nil {
		return fmt.Errorf("describe %s: %w", h.claim, errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// readInfo reads the info file of a claim. It fails if there is none, or if it is damaged.
func readInfo(dir, claim string) (Info, error) {
	f, err := os.Open(filepath.Join(dir, claim+".json"))
	if err != nil {
		return Info{}, err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxInfo))
	if err := errors.Join(err, f.Close()); err != nil {
		return Info{}, err
	}
	var info Info
	if err := json.Unmarshal(data, &info); err != nil {
		return Info{}, fmt.Errorf("read %s.json: %w", claim, err)
	}
	return info, nil
}
