package remotetest

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
)

// Faults of Main, in the variable FaultVariable. FileVariable names the file of FaultOnce.
const (
	FaultVariable = "MEANDER_REMOTETEST"
	FileVariable  = "MEANDER_REMOTETEST_FILE"

	FaultNoModule = "nomodule" // Python lacks a package
	FaultConfig   = "config"   // exit status 78
	FaultCrash    = "crash"    // ends at each call of velocity
	FaultPoison   = "poison"   // ends at a call of velocity for a prompt that has "poison"
	FaultOnce     = "once"     // ends at the third call of velocity, if the file does not exist yet
	FaultMute     = "mute"     // ends before it is ready
	FaultImport   = "import"   // never becomes ready
	FaultHang     = "hang"     // makes the file at the third call of velocity, and answers no more
)

// Main is the worker as a program: python -m meander.torch with these arguments. It returns the exit status.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) > 1 && args[0] == "-m" && args[1] == "meander.torch" {
		args = args[2:]
	}
	f := flag.NewFlagSet("meander.torch", flag.ContinueOnError)
	f.SetOutput(stderr)
	var o Options
	f.StringVar(&o.Dir, "model", "", "folder of the model")
	socket := f.String("socket", "", "path of the socket")
	listen := f.String("listen", "", "host:port")
	tokenFile := f.String("token-file", "", "file with the token")
	f.StringVar(&o.Device, "device", "auto", "device")
	f.StringVar(&o.DType, "dtype", "auto", "element type")
	f.BoolVar(&o.Deterministic, "deterministic", false, "row by row")
	f.BoolVar(&o.Compiled, "compile", false, "compiled")
	f.BoolVar(&o.VAETiling, "vae-tiling", false, "decodes in tiles")
	f.BoolVar(&o.Generic, "generic", false, "the pipeline as a whole")
	f.StringVar(&o.Family, "family", "", "FILE.py:NAME")
	f.StringVar(&o.Network, "network", "", "what computes")
	f.BoolVar(&o.TrustClass, "trust-class", false, "any class")
	f.StringVar(&o.TextEncoderDevice, "text-encoder-device", "", "device of the text encoders")
	f.Int("threads", 0, "threads")
	exit := f.Bool("exit-with-stdin", false, "end with stdin")
	if f.Parse(args) != nil {
		return 2
	}
	fault := os.Getenv(FaultVariable)
	switch fault {
	case FaultNoModule:
		fmt.Fprintln(stderr, "python3: Error while finding module specification: No module named 'torch'")
		return 1
	case FaultConfig:
		fmt.Fprintln(stderr, "loading\nerror: model: no weights in "+o.Dir)
		return 78
	case FaultMute:
		fmt.Fprintln(stderr, "Segmentation fault")
		return 3
	case FaultImport:
		fmt.Fprintln(stderr, "site: slow disk")
		_, _ = io.Copy(io.Discard, stdin) // until it is killed
		return 3
	}
	network, address := "unix", *socket
	if *listen != "" {
		token, err := os.ReadFile(*tokenFile)
		if err != nil {
			fmt.Fprintln(stderr, "error:", err)
			return 78
		}
		network, address, o.Token = "tcp", *listen, strings.TrimSpace(string(token))
	}
	w, err := New(o)
	if err == nil {
		w.plan(fault)
		err = w.Listen(network, address)
	}
	if err != nil {
		fmt.Fprintln(stderr, "error:", err)
		return 78
	}
	ready, _ := json.Marshal(map[string]any{
		"ready": true, "protocol": wire.Protocol, "address": w.Address(), "pid": os.Getpid(),
	})
	// First: who reads that it is ready may end it at once.
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, os.Interrupt)
	fmt.Fprintln(stderr, "serves", o.Dir)
	fmt.Fprintf(stdout, "%s\n", ready)
	if *exit {
		go func() {
			_, _ = io.Copy(io.Discard, stdin)
			end <- os.Interrupt
		}()
	}
	<-end
	w.Stop()
	return 0
}

// plan has the worker fail as a fault says.
func (w *Worker) plan(fault string) {
	die := func(*Worker, net.Conn, *wire.Message, func() *wire.Message) { os.Exit(9) }
	pass := func(_ *Worker, c net.Conn, _ *wire.Message, answer func() *wire.Message) { _ = wire.Write(c, answer()) }
	switch fault {
	case FaultPoison:
		w.dies = true
	case FaultCrash:
		w.Play(wire.CallVelocity, die)
	case FaultHang:
		w.Play(wire.CallVelocity, pass, pass, func(*Worker, net.Conn, *wire.Message, func() *wire.Message) {
			_ = os.WriteFile(os.Getenv(FileVariable), nil, 0o600)
			select {}
		})
	case FaultOnce:
		w.Play(wire.CallVelocity, pass, pass, func(w *Worker, c net.Conn, m *wire.Message,
			answer func() *wire.Message,
		) {
			f, err := os.OpenFile(os.Getenv(FileVariable), os.O_CREATE|os.O_EXCL, 0o600)
			if err == nil {
				_ = f.Close()
				die(w, c, m, answer)
			}
			pass(w, c, m, answer)
		})
	}
}
