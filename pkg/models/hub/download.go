package hub

import (
	"context"
	"crypto/sha1" //nolint:gosec // Git's own digest
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// incomplete is the end of the name of a blob that is not whole.
const incomplete = ".incomplete"

func (r Ref) blob(etag string) string { return filepath.Join(r.folder(), "blobs", etag) }

// waitForLock is how long the lock of a blob is left before it is tried again.
const waitForLock = 250 * time.Millisecond

// lock takes the lock of a blob, as huggingface_hub does; it waits while another process has it.
func (d *download) lock(ctx context.Context, f *file) (unlock func() error, err error) {
	path := filepath.Join(Cache(), ".locks", filepath.Base(d.ref.folder()), f.etag+".lock")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("lock %s: %w", f.Name, err)
	}
	l, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", f.Name, err)
	}
	for told := false; ; told = true {
		err := syscall.Flock(int(l.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return l.Close, nil // a file system without locks: each process writes what the other does
		}
		if !told {
			d.watch.say("another process downloads %s of %s; waiting for it", f.Name, d.ref)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), l.Close())
		case <-time.After(waitForLock):
		}
	}
}

// tries is how often a file is begun again before its download counts as cut off; a try that brings bytes does not
// count.
const tries = 4

// silence is how long no byte may come before the connection counts as lost.
const silence = time.Minute

// toBlob downloads a file, from where an earlier download has ended, checks it, and makes it a blob.
func (d *download) toBlob(ctx context.Context, f *file, blob string) (err error) {
	out, err := os.OpenFile(blob+incomplete, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer func() {
		if out != nil {
			err = errors.Join(err, out.Close())
		}
	}()
	have, err := out.Seek(0, io.SeekEnd)
	if err == nil && have > f.Size {
		have, err = 0, out.Truncate(0)
	}
	if err != nil {
		return err
	}
	for failed := 0; have < f.Size; {
		n, err := d.more(ctx, f, out, have)
		progress := n > have
		have = n
		switch {
		case err == nil && have == f.Size:
			continue
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
			return fmt.Errorf("no space is left in %s: free %s, or name another folder with HF_HOME; the same command "+
				"then goes on from here", Cache(), size(f.Size-have))
		case errors.Is(err, ErrName) || errors.Is(err, errDisk):
			return err
		}
		if progress {
			failed = 0
		}
		if failed++; failed >= tries {
			return fmt.Errorf("cut off after %s of %s: %w; the same command goes on from there", size(have),
				size(f.Size), err)
		}
		d.watch.say("%s: cut off after %s of %s, asked again", f.Name, size(have), size(f.Size))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(failed) * retryAfter):
		}
	}
	if err := d.check(out, f); err != nil {
		return err
	}
	err = errors.Join(out.Sync(), out.Close())
	if out = nil; err != nil {
		return err
	}
	return os.Rename(blob+incomplete, blob)
}

// retryAfter is the pause before a file is asked for again, times the tries that failed.
const retryAfter = 500 * time.Millisecond

// errDisk is wrapped by errors of the own disk.
var errDisk = errors.New("write to the cache")

// more appends what comes of a file to out, which has its first bytes, and returns how many it has then.
func (d *download) more(ctx context.Context, f *file, out *os.File, have int64) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var header []string
	if have > 0 {
		header = []string{"Range", fmt.Sprintf("bytes=%d-", have)}
	}
	a, err := d.ref.ask(ctx, d.client, http.MethodGet, d.ref.resolve(d.commit, f.Name), header...)
	if err != nil {
		return have, err
	}
	defer a.Body.Close()
	begins := fmt.Sprintf("bytes %d-", have)
	if have > 0 && (a.StatusCode != http.StatusPartialContent ||
		!strings.HasPrefix(a.Header.Get("Content-Range"), begins)) {
		// It sends the whole file, or does not know these bytes: from the start.
		if err := out.Truncate(0); err != nil {
			return have, fmt.Errorf("%w: %w", errDisk, err)
		}
		d.got(-have)
		if have = 0; a.StatusCode != http.StatusOK {
			return 0, fmt.Errorf("the Hub answers %d for the rest of the file", a.StatusCode)
		}
	}
	if _, err := out.Seek(have, io.SeekStart); err != nil {
		return have, fmt.Errorf("%w: %w", errDisk, err)
	}
	watchdog := time.AfterFunc(silence, func() { cancel(fmt.Errorf("nothing has come for %s", silence)) })
	defer watchdog.Stop()
	for buffer := make([]byte, 1<<20); ; {
		n, err := a.Body.Read(buffer)
		watchdog.Reset(silence)
		if have+int64(n) > f.Size {
			return have, fmt.Errorf("the Hub sends more than the %d bytes that it listed", f.Size)
		}
		if _, wrong := out.Write(buffer[:n]); wrong != nil {
			return have, fmt.Errorf("%w: %w", errDisk, wrong)
		}
		have += int64(n)
		d.got(int64(n))
		switch {
		case errors.Is(err, io.EOF) && have < f.Size:
			return have, io.ErrUnexpectedEOF
		case errors.Is(err, io.EOF):
			return have, nil
		case err != nil && context.Cause(ctx) != nil:
			return have, context.Cause(ctx)
		case err != nil:
			return have, err
		}
	}
}

// check compares a downloaded file with its digest, and throws it away where they differ.
func (d *download) check(out *os.File, f *file) error {
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return err
	}
	var h hash.Hash
	switch len(f.etag) {
	case 2 * sha256.Size:
		h = sha256.New()
	case 2 * sha1.Size:
		h = sha1.New() //nolint:gosec // Git's own digest
		fmt.Fprintf(h, "blob %d\x00", f.Size)
	default:
		return nil // a mirror with digests of its own: the size is right
	}
	if _, err := io.Copy(h, out); err != nil {
		return err
	}
	if is := hex.EncodeToString(h.Sum(nil)); is != f.etag {
		d.got(-f.Size)
		return errors.Join(fmt.Errorf("wrong checksum %.12s; must be %.12s: what came is thrown away; run the same "+
			"command again, and if it is wrong again, look at the proxy or the mirror (HF_ENDPOINT)", is, f.etag),
			os.Remove(out.Name()))
	}
	return nil
}

// checkSpace returns an error where the disk of the cache has no room for so many bytes.
func checkSpace(dir string, bytes int64) error {
	at := dir
	for {
		if _, err := os.Stat(at); err == nil || at == filepath.Dir(at) {
			break
		}
		at = filepath.Dir(at)
	}
	var s syscall.Statfs_t
	if err := syscall.Statfs(at, &s); err != nil {
		return nil // the download says what it meets
	}
	if free := int64(s.Bavail) * int64(s.Bsize); free < bytes { //nolint:unconvert // other systems have other types
		return fmt.Errorf("no space: %s are to come, and %s has %s free: free some, or name another folder with "+
			"HF_HOME", size(bytes), Cache(), size(free))
	}
	return nil
}

// size is a number of bytes for people.
func size(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
}
