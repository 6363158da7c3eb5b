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

// A claim is a lock file of a store and, beside it, a file that says who holds the lock.
// The lock goes with the process, however it ends; the files stay after a kill, and the
// lock shows that they are stale.
const (
	serverClaim   = "meander"  // held while a server has the store open
	pipelineClaim = "pipeline" // held while a process serves the store's pipeline, or is about to
)

const (
	// maxInfo bounds what is read of an info file.
	maxInfo = 64 << 10
	// lookPause is the pause before a lock is tried again that was held for a look only.
	lookPause = 5 * time.Millisecond
)

// Info says who has a store open, or serves its pipeline, and how to join.
type Info struct {
	PID int `json:"pid"`
	// URL is where the server listens; empty: it does not.
	URL string `json:"url,omitempty"`
	// Token is what a client must show; empty: none.
	Token string `json:"token,omitempty"`
	// Certificate is the one that the server shows, as PEM; empty: it does not speak TLS.
	Certificate string `json:"certificate,omitempty"`
	// Settings are those of the pipeline.
	Settings map[string]string `json:"settings,omitempty"`
}

// InUseError is returned when another process has the store open.
type InUseError struct {
	StoreDir string
	// Holder is zero when it has not said who it is.
	Holder Info
}

func (e *InUseError) Error() string {
	switch {
	case e.Holder.PID == 0:
		return fmt.Sprintf("store %q is in use by another process", e.StoreDir)
	case e.Holder.URL == "":
		return fmt.Sprintf("store %q is in use by process %d, which does not listen", e.StoreDir, e.Holder.PID)
	}
	return fmt.Sprintf("store %q is in use by process %d at %s", e.StoreDir, e.Holder.PID, e.Holder.URL)
}

// Running says whether a server has the store open, and how to join it. A file left
// behind by a killed one does not count.
func Running(storeDir string) (Info, bool) {
	// A server that starts has the lock before it can say how to reach it.
	for range 100 {
		info, held := look(storeDir, serverClaim)
		if !held || info.PID != 0 {
			return info, held
		}
		time.Sleep(20 * time.Millisecond)
	}
	return Info{}, true
}

// look says whether somebody holds a claim, and who: zero when it has not said so yet.
// For a moment after a holder was killed and another came, it may name the dead one.
func look(dir, claim string) (Info, bool) {
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

// held is a claim that this process holds.
type held struct {
	dir, claim string
	lock       *os.File
	// stale says that the one before ended without letting go.
	stale bool
}

// take takes a claim, or returns *InUseError at once when another process holds it. One
// that only looks (a shared lock, for a moment) is waited for.
func take(ctx context.Context, dir, claim string) (*held, error) {
	f, err := os.OpenFile(filepath.Join(dir, claim+".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	for {
		if err = flock(f, unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) || ctx.Err() != nil {
			break
		}
		if flock(f, unix.LOCK_SH|unix.LOCK_NB) != nil {
			break // somebody has it to himself
		}
		_ = flock(f, unix.LOCK_UN) // fails on a bad descriptor only
		time.Sleep(lookPause/2 + rand.N(lookPause))
	}
	h := &held{dir: dir, claim: claim, lock: f}
	if err == nil {
		// What lies there belongs to a process that was killed.
		err = os.Remove(h.info())
		h.stale = err == nil
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

func (h *held) info() string { return filepath.Join(h.dir, h.claim+".json") }

// release lets go of the claim.
func (h *held) release() error {
	err := os.Remove(h.info())
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	if closing := h.lock.Close(); closing != nil {
		err = errors.Join(err, fmt.Errorf("unlock store %q: %w", h.dir, closing))
	}
	return err
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// describe replaces the info file whole, so that a reader never sees half of it. Only
// the owner may read it: it holds the token.
func (h *held) describe(info Info) error {
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
		err = os.Rename(f.Name(), h.info())
	}
	if err != nil {
		return fmt.Errorf("describe %s: %w", h.claim, errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

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
