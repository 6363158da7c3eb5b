package natsd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lockFile is locked while a server has the store open. The lock goes with the
	// process, however it ends; the file stays.
	lockFile = "meander.lock"
	// infoFile tells others how to join. After a kill it is stale, which the lock shows.
	infoFile = "meander.json"
	// maxInfo bounds what is read of it.
	maxInfo = 64 << 10
)

// Info says who has a store open and how to join.
type Info struct {
	PID int `json:"pid"`
	// URL is where the server listens; empty: it does not.
	URL string `json:"url"`
	// Token is what a client must show; empty: none.
	Token string `json:"token,omitempty"`
}

// InUseError is returned by Start when another server has the store open.
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

// Running says whether a server has the store open, and how to join it. A file
// left behind by a killed one does not count.
func Running(storeDir string) (Info, bool) {
	f, err := os.Open(filepath.Join(storeDir, lockFile))
	if err != nil {
		return Info{}, false
	}
	defer func() { _ = f.Close() }() // read-only
	if err := flock(f, unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		return Info{}, false
	}
	// A server that starts has the lock before it can say how to reach it.
	for range 100 {
		if info, err := readInfo(storeDir); err == nil {
			return info, true
		}
		if flock(f, unix.LOCK_SH|unix.LOCK_NB) == nil {
			return Info{}, false // it gave up
		}
		time.Sleep(20 * time.Millisecond)
	}
	return Info{}, true
}

// lockStore opens and locks the store's lock file. It tries for a moment: Running
// in another process holds the lock while it looks.
func lockStore(ctx context.Context, dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	for range 10 {
		if err = flock(f, unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) || ctx.Err() != nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err == nil {
		// What lies there belongs to a server that was killed.
		if err = os.Remove(filepath.Join(dir, infoFile)); err == nil || errors.Is(err, os.ErrNotExist) {
			return f, nil
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		inUse := &InUseError{StoreDir: dir}
		if info, readErr := readInfo(dir); readErr == nil {
			inUse.Holder = info
		}
		err = inUse
	} else {
		err = fmt.Errorf("lock store %q: %w", dir, err)
	}
	return nil, errors.Join(err, f.Close())
}

func unlockStore(dir string, f *os.File) error {
	if err := f.Close(); err != nil {
		return fmt.Errorf("unlock store %q: %w", dir, err)
	}
	return nil
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// writeInfo replaces the file whole, so that a reader never sees half of it. Only
// the owner may read it: it holds the token.
func writeInfo(dir string, info Info) error {
	data, err := json.Marshal(info)
	if err != nil {
		return fmt.Errorf("describe server: %w", err)
	}
	f, err := os.CreateTemp(dir, infoFile+".*") // mode 0600
	if err != nil {
		return fmt.Errorf("describe server: %w", err)
	}
	_, err = f.Write(append(data, '\n'))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, infoFile))
	}
	if err != nil {
		return fmt.Errorf("describe server: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

func readInfo(dir string) (Info, error) {
	f, err := os.Open(filepath.Join(dir, infoFile))
	if err != nil {
		return Info{}, err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxInfo))
	if err := errors.Join(err, f.Close()); err != nil {
		return Info{}, err
	}
	var info Info
	if err := json.Unmarshal(data, &info); err != nil {
		return Info{}, fmt.Errorf("read %q: %w", infoFile, err)
	}
	return info, nil
}
