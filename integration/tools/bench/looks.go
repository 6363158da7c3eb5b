package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// looksBench is one `bench looks` command.
type looksBench struct {
	bin, store   string
	runs, groups int
	rounds       int
	stderr       io.Writer
	idle         float64 // of 'meander up', processor seconds a second
}

func benchLooksCommand() *cobra.Command {
	b := looksBench{}
	c := &cobra.Command{
		Use:   "looks",
		Short: "processor time of status, runs, top, the page, doctor and export on a store of many runs",
		Long: `looks makes a store: one run of the synthetic model, and as many copies of its events under other names as
--runs says, each of --groups groups of four. Then it starts 'meander up' on it, and looks at it as people do.
It reads the processor time of the process that looks, and that of 'meander up' meanwhile, from the kernel.
The report is Markdown.`,
		Example: `  bench looks
  bench looks --runs 10000 --groups 25 --store /data/looks    # is made once, and kept`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			err := errors.Join(checkPositive("runs", []int{b.runs}, 10_000),
				checkPositive("groups", []int{b.groups}, 1000), checkPositive("rounds", []int{b.rounds}, 100))
			if err != nil {
				return usage(err)
			}
			b.stderr = c.ErrOrStderr()
			return b.run(c.Context(), c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&b.bin, "bin", "bin", "folder of the program meander")
	f.StringVar(&b.store, "store", "", "folder of the store, kept for the next time; default a temporary one")
	f.IntVar(&b.runs, "runs", 1000, "runs in the store")
	f.IntVar(&b.groups, "groups", 25, "groups of four samples in each")
	f.IntVar(&b.rounds, "rounds", 5, "looks of each kind; the medians are reported")
	return c
}

// nameOfRun is the run of an index. All have the same length.
func nameOfRun(i int) string { return fmt.Sprintf("bench-look-%05d", i) }

// model are the flags of the sampler. Its images are small: what is measured is how many events there are.
var looksModel = []string{"--model", "synthetic", "--workers", "1"}

func (b *looksBench) run(ctx context.Context, out io.Writer) (err error) {
	if b.store == "" {
		if b.store, err = os.MkdirTemp("", "meander-bench-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(b.store)) }()
	}
	if _, err := os.Stat(filepath.Join(b.store, "jetstream")); err != nil {
		if err := b.make(ctx); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "%s\n", machine())
	return b.look(ctx, out)
}

// make makes the store.
func (b *looksBench) make(ctx context.Context) error {
	args := append([]string{
		"run", "--store", b.store, "--run", nameOfRun(0), "--out", "-", "--group-size", "4", "--steps", "4",
		"--return-steps", "3", "--width", "64", "--height", "64",
	}, looksModel...)
	for i := range b.groups {
		args = append(args, fmt.Sprintf(`a red sign that says "%d"`, i))
	}
	if _, err := b.cpuOf(ctx, args...); err != nil {
		return err
	}
	server, err := natsd.Start(ctx, natsd.Options{StoreDir: b.store, Listen: "127.0.0.1:0", Log: zerolog.Nop()})
	if err != nil {
		return err
	}
	conn, err := bus.Connect(ctx, bus.Config{InProcess: server.InProcess(), Name: "bench"}, zerolog.Nop())
	if err == nil {
		err = errors.Join(b.copyRun(ctx, conn), conn.Close())
	}
	return errors.Join(err, server.Close())
}

// copyRun stores what is stored of the first run under the names of all others. No service has work with it.
func (b *looksBench) copyRun(ctx context.Context, conn *bus.Bus) error {
	js, err := jetstream.New(conn.Conn(), jetstream.WithPublishAsyncMaxPending(1024),
		jetstream.WithDefaultTimeout(time.Minute))
	if err != nil {
		return err
	}
	for _, s := range append(schemas.Streams(), schemas.StreamSpec{Name: schemas.StreamRunBucket}) {
		var events []*bus.Message
		for m, err := range conn.Read(ctx, s.Name, nil, bus.ReadOptions{}) {
			if err != nil {
				return err
			}
			if strings.Contains(m.Subject, nameOfRun(0)) {
				events = append(events, m)
			}
		}
		if len(events) == 0 {
			continue
		}
		for i := 1; i < b.runs; i++ {
			for _, m := range events {
				event := renamed(m, s, nameOfRun(i))
				if _, err := js.PublishMsgAsync(event, jetstream.WithRetryAttempts(100),
					jetstream.WithStallWait(time.Minute)); err != nil {
					return err
				}
			}
		}
		<-js.PublishAsyncComplete()
		fmt.Fprintf(b.stderr, "%s: %d events\n", s.Name, len(events)*b.runs)
		if err := drain(ctx, js, s.Name); err != nil {
			return err
		}
	}
	return nil
}

// renamed is an event of the first run as one of another. The server adds the partition to its subject again.
func renamed(m *bus.Message, s schemas.StreamSpec, run string) *nats.Msg {
	at := strings.Split(strings.ReplaceAll(m.Subject, nameOfRun(0), run), ".")
	if s.TransformDest != "" {
		at = append(at[:3], at[4:]...)
	}
	out := nats.NewMsg(strings.Join(at, "."))
	out.Data = bytes.ReplaceAll(m.Data, []byte(nameOfRun(0)), []byte(run))
	for name, values := range m.Header {
		if !strings.HasPrefix(name, "Nats-") {
			out.Header[name] = values
		}
	}
	return out
}

// drain acknowledges all messages of a stream for each of its durable consumers.
func drain(ctx context.Context, js jetstream.JetStream, stream string) error {
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return err
	}
	list := s.ListConsumers(ctx)
	for info := range list.Info() {
		c, err := s.Consumer(ctx, info.Name)
		if err != nil {
			return err
		}
		options := []jetstream.FetchOpt{jetstream.FetchMaxWait(time.Second)}
		for _, group := range info.Config.PriorityGroups {
			options = append(options, jetstream.FetchPriorityGroup(group))
		}
		for info.NumPending > 0 || info.NumAckPending > 0 {
			batch, err := c.Fetch(500, options...)
			if err != nil {
				return err
			}
			for m := range batch.Messages() {
				if err := m.Ack(); err != nil {
					return err
				}
			}
			if info, err = c.Info(ctx); err != nil {
				return err
			}
		}
	}
	return list.Err()
}

// cpuOf runs meander to its end and returns the processor time that it took.
func (b *looksBench) cpuOf(ctx context.Context, args ...string) (time.Duration, error) {
	c := exec.CommandContext(ctx, filepath.Join(b.bin, "meander"), args...)
	out, err := c.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 1 && args[0] == "doctor" {
		err = nil // it found something
	}
	if err != nil {
		return 0, fmt.Errorf("meander %s: %w\n%s", args[0], err, out)
	}
	return c.ProcessState.UserTime() + c.ProcessState.SystemTime(), nil
}

// cpuOfProcess is the processor time of a process so far, from the kernel: that of its threads, which end with it.
func cpuOfProcess(pid int) (time.Duration, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(threads) == 0 {
		return 0, fmt.Errorf("process %d: no threads in /proc", pid)
	}
	sum := time.Duration(0)
	for _, name := range threads {
		data, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		first, _, _ := strings.Cut(string(data), " ")
		n, wrong := strconv.ParseInt(first, 10, 64)
		if err := errors.Join(err, wrong); err != nil {
			return 0, err
		}
		sum += time.Duration(n)
	}
	return sum, nil
}

// freeAddress is an address of this machine that nothing listens at.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// serve starts a command that goes on, and waits until yes; stop ends it.
func (b *looksBench) serve(
	ctx context.Context, yes func() (bool, error), args ...string,
) (pid int, stop func(), err error) {
	c := exec.CommandContext(ctx, filepath.Join(b.bin, "meander"), args...)
	c.Stdout, c.Stderr = b.stderr, b.stderr
	if err := c.Start(); err != nil {
		return 0, nil, fmt.Errorf("%w; 'make build' makes the programs", err)
	}
	stop = func() {
		_ = c.Process.Signal(os.Interrupt)
		_ = c.Wait()
	}
	if err := poll(ctx, 50*time.Millisecond, yes); err != nil {
		stop()
		return 0, nil, err
	}
	return c.Process.Pid, stop, nil
}

// get asks a page.
func get(ctx context.Context, url string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, answer.Status)
	}
	_, read := io.Copy(io.Discard, answer.Body)
	return errors.Join(err, read)
}

const looksHead = `%d runs of %d groups of 4: %d samples. Processor time of a look, medians of %d. 'meander up' starts in
%.1f s, and takes %.0f ms a second when nobody looks, which are not counted.

| look | first, ms | ms | 'meander up' meanwhile, ms |
| --- | --- | --- | --- |
| start of up | %d | | |
| its janitor counts and measures what is new | %d | | |
`

// look starts the pipeline and the page, and writes a line for each kind of look.
func (b *looksBench) look(ctx context.Context, out io.Writer) error {
	listen, err := freeAddress()
	if err != nil {
		return err
	}
	page, err := freeAddress()
	if err != nil {
		return err
	}
	url := "nats://" + listen
	began := time.Now()
	up, stop, err := b.serve(ctx, func() (bool, error) {
		conn, err := bus.Connect(ctx, bus.Config{URL: url, NoWait: true}, zerolog.Nop())
		if err != nil {
			return false, nil
		}
		present, _ := conn.Present(ctx)
		return len(present) > 1, conn.Close() // sampler and reward service
	}, append([]string{"up", "--store", b.store, "--listen", listen}, looksModel...)...)
	if err != nil {
		return err
	}
	defer stop()
	started := time.Since(began)
	startCPU, err := cpuOfProcess(up)
	if err != nil {
		return err
	}
	if err := b.awaitCounts(ctx, url); err != nil {
		return err
	}
	countCPU, err := cpuOfProcess(up)
	if err != nil {
		return err
	}
	ui, stopUI, err := b.serve(ctx, func() (bool, error) { return get(ctx, "http://"+page+"/") == nil, nil },
		"ui", "--nats", url, "--listen", page)
	if err != nil {
		return err
	}
	defer stopUI()
	if err := b.rest(up); err != nil {
		return err
	}
	heading(out, "Looks")
	fmt.Fprintf(out, looksHead, b.runs, b.groups, 4*b.runs*b.groups, b.rounds, started.Seconds(), b.idle*1000,
		startCPU.Milliseconds(), (countCPU - startCPU).Milliseconds())
	export := filepath.Join(b.store, "export")
	for _, args := range [][]string{
		{"status", nameOfRun(b.runs / 2)},
		{"runs", "ls"},
		{"top", "--once"},
		{"show", "--run", nameOfRun(b.runs / 2)},
		{"doctor"},
		{"gc", "--gc-age", "1s", "--gc-grace", "1s", "--dry-run"},
		{"runs", "export", nameOfRun(b.runs / 2), "--out", export},
	} {
		name := strings.Join(args, " ")
		name = strings.ReplaceAll(strings.ReplaceAll(name, nameOfRun(b.runs/2), "RUN"), export, "FILE")
		if err := b.line(out, up, name, 0, func() (time.Duration, error) {
			_ = os.Remove(export)
			return b.cpuOf(ctx, append(args, "--nats", url)...)
		}); err != nil {
			return err
		}
	}
	// After 3 s the last answer is too old.
	return b.line(out, up, "GET /api/runs", 3*time.Second, func() (time.Duration, error) {
		before, err := cpuOfProcess(ui)
		if err != nil {
			return 0, err
		}
		if err := get(ctx, "http://"+page+"/api/runs"); err != nil {
			return 0, err
		}
		after, err := cpuOfProcess(ui)
		return after - before, err
	})
}

// rest finds what 'meander up' takes when nobody looks.
func (b *looksBench) rest(up int) error {
	const quiet = 4 * time.Second
	time.Sleep(5 * quiet) // a server that has started has work to do for a while
	before, err := cpuOfProcess(up)
	time.Sleep(quiet)
	after, err2 := cpuOfProcess(up)
	b.idle = (after - before).Seconds() / quiet.Seconds()
	return errors.Join(err, err2)
}

// awaitCounts waits until the janitor has counted and measured all runs.
func (b *looksBench) awaitCounts(ctx context.Context, url string) error {
	conn, err := bus.Connect(ctx, bus.Config{URL: url}, zerolog.Nop())
	if err != nil {
		return err
	}
	err = poll(ctx, time.Second, func() (bool, error) {
		keys, err := conn.Entries(ctx, schemas.CountBucket, "*")
		measured := func(e bus.Entry) bool { return bytes.Contains(e.Value, []byte("\xa1z\xc3")) } // the head
		return slices.ContainsFunc(keys, measured), err
	})
	return errors.Join(err, conn.Close())
}

// line looks several times, after a pause, and writes what it took; of 'meander up' what it takes more than idle.
func (b *looksBench) line(
	out io.Writer, up int, name string, pause time.Duration, look func() (time.Duration, error),
) error {
	rounds := b.rounds
	if strings.HasPrefix(name, "gc ") { // it asks about each group
		rounds = 1
	}
	var mine, server []float64
	var first float64
	for i := range rounds + 1 {
		time.Sleep(pause)
		before, err := cpuOfProcess(up)
		if err != nil {
			return err
		}
		began := time.Now()
		took, err := look()
		if err != nil {
			return err
		}
		after, err := cpuOfProcess(up)
		if err != nil {
			return err
		}
		if i == 0 {
			first = took.Seconds() * 1000
			continue
		}
		idle := b.idle * time.Since(began).Seconds()
		mine, server = append(mine, took.Seconds()*1000), append(server, ((after-before).Seconds()-idle)*1000)
	}
	fmt.Fprintf(out, "| %s | %.0f | %.0f | %.0f |\n", name, first, median(mine), median(server))
	return nil
}
