package command

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/trace"
)

// traceCommand makes the command 'meander trace'.
func traceCommand(a *app) *cobra.Command {
	once, since := false, time.Duration(0)
	c := &cobra.Command{
		Use: "trace [RUN]", Short: "send a trace of each group to OpenTelemetry",
		Long: `trace sends a trace for each group that closes, from its prompt to its advantages: intake, and for each
sample the wait for a sampler, encoding, denoising with its steps, decoding and each reward function.
Without RUN it takes all runs, and pushed policies with the samplers that took them over. A prompt with
a traceparent continues that trace.

The collector is that of the standard variables, by OTLP over HTTP: OTEL_EXPORTER_OTLP_ENDPOINT (default
http://localhost:4318), OTEL_EXPORTER_OTLP_HEADERS and so on. Ids follow from names: what is sent twice
is the same trace. It reads, and changes nothing.`,
		Example: `  meander trace
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 meander trace --since 1h
  meander trace night --once`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			run := schemas.Run("*")
			if len(given) > 0 {
				if _, err := storedRun(c.Context(), conn.Bus, given[0]); err != nil {
					return err
				}
				run = schemas.Run(given[0])
			}
			if since < 0 || once && since > 0 {
				return usage(fmt.Errorf("--since: %v; must not be negative, and be absent with --once", since))
			}
			return a.exportTraces(c, conn, run, once, since)
		}),
	}
	c.Flags().BoolVar(&once, "once", false, "send what is stored, and end")
	c.Flags().DurationVar(&since, "since", 0,
		"send what has closed in this time, too; by default only what closes from now on")
	return c
}

// exportTraces sends traces to the collector of the environment, until the context ends or, with once, all stored ones
// are sent.
func (a *app) exportTraces(c *cobra.Command, conn *connection, run schemas.Run, once bool, since time.Duration) error {
	const all, own = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
	if p := cmp.Or(os.Getenv(own), os.Getenv(all), "http/protobuf"); p != "http/protobuf" {
		return usage(fmt.Errorf("%s: %q; must be http/protobuf, which collectors take at port 4318", all, p))
	}
	var options []otlptracehttp.Option
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
		// The library's own default is https, which collectors do not serve unless they are told to.
		options = append(options, otlptracehttp.WithEndpointURL("http://localhost:4318/v1/traces"))
	}
	exporter, err := otlptracehttp.New(c.Context(), options...)
	if err != nil {
		return usage(fmt.Errorf("the variables OTEL_EXPORTER_OTLP_*: %w", err))
	}
	defer func() { _ = exporter.Shutdown(context.WithoutCancel(c.Context())) }() // all is sent
	traces, spans := 0, 0
	o := trace.Options{
		Run: run, Live: !once,
		Exported: func(name string, n int) {
			traces, spans = traces+1, spans+n
			if !once {
				fmt.Fprintf(c.ErrOrStderr(), "%s: %s\n", name, present.Count(n, "span"))
			}
		},
		Failed: func(err error) error {
			if once {
				return fmt.Errorf("%w; OTEL_EXPORTER_OTLP_ENDPOINT names the collector", err)
			}
			fmt.Fprintf(c.ErrOrStderr(), "not sent: %v\n", err)
			return nil
		},
	}
	if !once {
		o.Since = time.Now().Add(-since)
	}
	err = trace.Export(c.Context(), conn.Bus, exporter, o)
	fmt.Fprintf(c.OutOrStdout(), "%s, %s\n", present.Count(traces, "trace"), present.Count(spans, "span"))
	if c.Context().Err() != nil && !once {
		return nil // stopped
	}
	return err
}
