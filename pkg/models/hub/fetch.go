package hub

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Plan is a download that is about to begin.
type Plan struct {
	// Name is what was asked for, with the commit.
	Name string
	// Files are to be downloaded, Bytes in all, of which Have are here from a download that was cut off.
	Files       int
	Bytes, Have int64
	// To is the folder of the repository in the cache.
	To string
}

// Watcher is told of a download. Its functions may be nil.
type Watcher struct {
	// Plan is called once before the first byte.
	Plan func(Plan)
	// Got is called with the bytes that have come, by several goroutines, one at a time; fewer than 0 where bytes are
	// thrown away.
	Got func(bytes int64)
	// Say is called with what a person should know: another name, another try.
	Say func(line string)
	// End is called once after Plan.
	End func(err error)
}

func (w Watcher) say(format string, args ...any) {
	if w.Say != nil {
		w.Say(fmt.Sprintf(format, args...))
	}
}

// filesAtOnce is how many files come side by side.
const filesAtOnce = 4

// Fetch returns the folder of the model or adapter with this name: that of the cache, once what is missing there is
// downloaded. A name that is a path, or that cannot be one of the Hub, has none: dir is empty. An error names what
// mends it; ErrName: another name, revision or token would.
func Fetch(ctx context.Context, name string, want Want, watch Watcher) (dir string, err error) {
	if _, err := os.Stat(name); err == nil {
		return "", nil
	}
	r, ok := Parse(name)
	if !ok {
		return "", nil
	}
	dir = Local(name)
	missing := []string{everything}
	if dir != "" {
		missing = want.lacking(dir)
	}
	if len(missing) == 0 {
		return dir, nil
	}
	return r.update(ctx, want, watch, missing)
}

// Update is Fetch that also asks the Hub whether the revision is another commit than the cache has.
func Update(ctx context.Context, name string, want Want, watch Watcher) (dir string, err error) {
	r, ok := Parse(name)
	if !ok {
		return "", fmt.Errorf("%w: %q; must be ORG/NAME or ORG/NAME@REVISION", ErrName, name)
	}
	return r.update(ctx, want, watch, []string{everything})
}

// everything is what is missing where nothing is there.
const everything = "all"

// update downloads what the cache lacks, as Fetch does; missing is known to lack.
func (r Ref) update(ctx context.Context, want Want, watch Watcher, missing []string) (dir string, err error) {
	if err := r.mayDownload(missing); err != nil {
		return "", err
	}
	dir, err = r.fetch(ctx, watch, func(c *http.Client, l *listing) ([]file, error) {
		return r.choose(ctx, c, l, want)
	})
	if err != nil {
		return "", fmt.Errorf("%s: %w", r, err)
	}
	return dir, nil
}

// FetchFile returns the path in the cache of a file of a data set (ParseDataset), once it is downloaded, and its
// address with the commit. Errors are those of Fetch.
func FetchFile(ctx context.Context, address string, watch Watcher) (path, source string, err error) {
	r, err := ParseDataset(address)
	if err != nil {
		return "", "", err
	}
	commit := r.cachedCommit()
	path = filepath.Join(r.snapshot(commit), filepath.FromSlash(r.File))
	if _, err := os.Stat(path); err == nil && commit != "" {
		return path, r.at(commit), nil
	}
	if err := r.mayDownload([]string{everything}); err != nil {
		return "", "", err
	}
	dir, err := r.fetch(ctx, watch, func(_ *http.Client, l *listing) ([]file, error) {
		i := slices.IndexFunc(l.Files, func(f file) bool { return f.Name == r.File })
		if i < 0 {
			return nil, fmt.Errorf("%w: it has no file %s: see %s/tree/%s", ErrName, r.File, r.page(), r.Revision)
		}
		return l.Files[i : i+1], nil
	})
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", r, err)
	}
	return filepath.Join(dir, filepath.FromSlash(r.File)), r.at(filepath.Base(dir)), nil
}

// at is the name at a commit.
func (r Ref) at(commit string) string {
	r.Revision = commit
	return r.String()
}

// mayDownload returns an error where a variable forbids it. missing is what the cache lacks.
func (r Ref) mayDownload(missing []string) error {
	v := Offline()
	if v == "" {
		return nil
	}
	lacks := "does not have it"
	if missing[0] != everything {
		lacks = "has it without " + strings.Join(missing, ", ")
	}
	return fmt.Errorf("%s: %w: %s=%s forbids downloads, and the cache %s %s; unset %[3]s, or fetch it where there is "+
		"a network and copy %[7]s here", r, ErrName, v, os.Getenv(v), Cache(), lacks, filepath.Base(r.folder()))
}

// choose returns the files of a listing that are wanted. Of a pipeline it fetches model_index.json, which names the
// parts.
func (r Ref) choose(ctx context.Context, c *http.Client, l *listing, want Want) ([]file, error) {
	var index []byte
	if i := slices.IndexFunc(l.Files, func(f file) bool { return f.Name == pipelineFile }); i >= 0 && want != Adapter {
		f := &l.Files[i]
		if err := r.describe(ctx, c, l.Commit, f); err != nil {
			return nil, err
		}
		d := &download{ref: r, client: c, commit: l.Commit}
		if err := d.get(ctx, f); err != nil {
			return nil, err
		}
		var err error
		if index, err = os.ReadFile(filepath.Join(r.snapshot(l.Commit), pipelineFile)); err != nil {
			return nil, err
		}
	}
	return want.choose(l.Files, index)
}

// fetch downloads the files of the repository that choose returns, and returns its snapshot in the cache.
func (r Ref) fetch(ctx context.Context, watch Watcher, choose func(*http.Client, *listing) ([]file, error),
) (dir string, err error) {
	c := newClient()
	defer c.CloseIdleConnections()
	l, err := r.list(ctx, c)
	if err != nil {
		return "", err
	}
	if !strings.EqualFold(l.ID, r.ID) {
		watch.say("%s is called %s on the Hub now: name that one from now on", r.ID, l.ID)
	}
	files, err := choose(c, &l)
	if err != nil {
		return "", err
	}
	dir = r.snapshot(l.Commit)
	missing, plan, err := r.missing(ctx, c, l.Commit, files)
	if err != nil {
		return "", err
	}
	if len(missing) > 0 {
		if err := checkSpace(r.folder(), plan.Bytes-plan.Have); err != nil {
			return "", err
		}
		if watch.Plan != nil {
			watch.Plan(plan)
		}
		d := &download{ref: r, client: c, commit: l.Commit, watch: watch}
		err = d.all(ctx, missing)
		if watch.End != nil {
			watch.End(err)
		}
		if err != nil {
			return "", err
		}
	}
	return dir, r.noteCommit(l.Commit)
}

// missing returns the files that the snapshot lacks, and the plan to download them.
func (r Ref) missing(ctx context.Context, c *http.Client, commit string, files []file) (missing []file, p Plan,
	err error,
) {
	p = Plan{Name: r.at(commit), To: r.folder()}
	for _, f := range files {
		if err := r.describe(ctx, c, commit, &f); err != nil {
			return nil, p, err
		}
		if _, err := os.Stat(filepath.Join(r.snapshot(commit), filepath.FromSlash(f.Name))); err == nil {
			continue
		}
		missing = append(missing, f)
		_, err := os.Stat(r.blob(f.etag))
		if err == nil || slices.ContainsFunc(missing[:len(missing)-1], func(o file) bool { return o.etag == f.etag }) {
			continue // it has, or will have, the bytes of another file
		}
		p.Files, p.Bytes = p.Files+1, p.Bytes+f.Size
		if part, err := os.Stat(r.blob(f.etag) + incomplete); err == nil {
			p.Have += min(part.Size(), f.Size)
		}
	}
	return missing, p, nil
}

// noteCommit writes which commit the revision is.
func (r Ref) noteCommit(commit string) error {
	if r.Revision == commit {
		return nil
	}
	path := filepath.Join(r.folder(), "refs", filepath.FromSlash(r.Revision))
	if r.cachedCommit() == commit {
		return nil
	}
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path+".new", []byte(commit), 0o644)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("note the commit of %s: %w", r, err)
	}
	return nil
}

// download gets files into the cache.
type download struct {
	ref    Ref
	client *http.Client
	commit string
	watch  Watcher

	mu sync.Mutex // of watch.Got
}

func (d *download) got(bytes int64) {
	if d.watch.Got == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watch.Got(bytes)
}

// all gets the files, some side by side. The first error ends it.
func (d *download) all(ctx context.Context, files []file) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(filesAtOnce)
	same := map[string][]file{}
	for _, f := range files {
		same[f.etag] = append(same[f.etag], f)
	}
	for _, files := range same {
		g.Go(func() error {
			for _, f := range files {
				if err := d.get(ctx, &f); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// get gets one file, and links it into the snapshot.
func (d *download) get(ctx context.Context, f *file) (err error) {
	link := filepath.Join(d.ref.snapshot(d.commit), filepath.FromSlash(f.Name))
	if _, err := os.Stat(link); err == nil {
		return nil
	}
	blob := d.ref.blob(f.etag)
	if err := errors.Join(os.MkdirAll(filepath.Dir(blob), 0o755), os.MkdirAll(filepath.Dir(link), 0o755)); err != nil {
		return fmt.Errorf("write to the cache: %w; name a folder that can be written with HF_HOME", err)
	}
	unlock, err := d.lock(ctx, f)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if _, err := os.Stat(blob); err != nil {
		if err := d.toBlob(ctx, f, blob); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	target, err := filepath.Rel(filepath.Dir(link), blob)
	if err != nil {
		return err
	}
	_ = os.Remove(link) // a link to a blob that is gone
	if err := os.Symlink(target, link); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}
