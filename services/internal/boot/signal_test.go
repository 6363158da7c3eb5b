package boot_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/services/internal/boot"
)

// asProgram makes the test binary the program under test: signals end processes.
const asProgram = "BOOT_TEST_PROGRAM"

func TestMain(m *testing.M) {
	switch os.Getenv(asProgram) {
	case "":
		goleak.VerifyTestMain(m)
	case "drains":
		ctx, stop := boot.Signals(context.Background(), zerolog.Nop())
		defer stop()
		fmt.Println("working")
		<-ctx.Done()
		fmt.Println("draining")
	case "hangs":
		ctx, _ := boot.Signals(context.Background(), zerolog.Nop())
		fmt.Println("working")
		<-ctx.Done()
		fmt.Println("draining")
		time.Sleep(time.Minute)
	}
}

func TestSignals(t *testing.T) {
	for _, tc := range []struct {
		program string
		signals []os.Signal // one per line the program prints
		want    int
	}{
		{"drains", []os.Signal{syscall.SIGTERM}, 0},
		{"drains", []os.Signal{os.Interrupt}, 0},
		{"hangs", []os.Signal{syscall.SIGTERM, syscall.SIGTERM}, 1},
		{"hangs", []os.Signal{os.Interrupt, syscall.SIGTERM}, 1},
	} {
		t.Run(fmt.Sprint(tc.program, tc.signals), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), asProgram+"="+tc.program)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(out)
			for _, s := range tc.signals {
				if !lines.Scan() {
					t.Fatalf("program ended early: %v", lines.Err())
				}
				if err := cmd.Process.Signal(s); err != nil {
					t.Fatal(err)
				}
			}
			for lines.Scan() {
				continue
			}
			err = cmd.Wait()
			if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
				t.Fatal(err)
			} else if got := cmd.ProcessState.ExitCode(); got != tc.want {
				t.Errorf("exit status %d (%v), want %d", got, exit, tc.want)
			}
		})
	}
}

func TestSignals_StopGivesSignalsBack(t *testing.T) {
	ctx, stop := boot.Signals(t.Context(), zerolog.Nop())
	stop()
	stop() // twice is fine
	if ctx.Err() == nil {
		t.Error("context still open after stop")
	}
}

// A terminal that goes asks a program to end, unless it was started to outlive it.
func TestEndSignals(t *testing.T) {
	received := make(chan os.Signal, 1)
	signal.Notify(received, syscall.SIGHUP) // no longer ignored, where the tests run under nohup
	defer signal.Stop(received)
	if !slices.Contains(boot.EndSignals(), os.Signal(syscall.SIGHUP)) {
		t.Error("without SIGHUP; must be there")
	}
	signal.Ignore(syscall.SIGHUP)
	defer signal.Reset(syscall.SIGHUP)
	if slices.Contains(boot.EndSignals(), os.Signal(syscall.SIGHUP)) {
		t.Error("SIGHUP, which is ignored; must not be there")
	}
}
