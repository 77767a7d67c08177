// River, behind the same few commands as the other peers (benches/protocol.rs says how they talk): our own short code
// on its public API, at the settings of its own benchmark.
//
//	river setup | preload N | bulk N BATCH | drain | enqueue N TASKS | latency N EVERY_MS
//
// on the database at $DATABASE_URL.
package main

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

var (
	start  = time.Now()
	done   atomic.Int64
	lock   sync.Mutex
	waited []int64
	lines  = bufio.NewScanner(os.Stdin)
)

type noOp struct {
	Sent int64 `json:"sent"`
}

func (noOp) Kind() string { return "no_op" }

type worker struct{ river.WorkerDefaults[noOp] }

func (*worker) Work(_ context.Context, job *river.Job[noOp]) error {
	if job.Args.Sent > 0 {
		now := int64(time.Since(start))
		lock.Lock()
		waited = append(waited, now-job.Args.Sent)
		lock.Unlock()
	}
	done.Add(1)
	return nil
}

func main() {
	ctx := context.Background()
	connections := 20
	if os.Args[1] == "enqueue" {
		connections = number(3)
	}
	config := must(pgxpool.ParseConfig(os.Getenv("DATABASE_URL")))
	config.MaxConns = int32(connections)
	driver := riverpgxv5.New(must(pgxpool.NewWithConfig(ctx, config)))
	switch os.Args[1] {
	case "setup":
		must(must(rivermigrate.New(driver, nil)).Migrate(ctx, rivermigrate.DirectionUp, nil))
	case "preload":
		bulk(ctx, newClient(driver), number(2), 5000)
	case "bulk":
		client := newClient(driver)
		bulk(ctx, client, 5*number(3), number(3))
		ready()
		began := time.Now()
		bulk(ctx, client, number(2), number(3))
		fmt.Println("seconds", time.Since(began).Seconds())
	case "drain":
		ready()
		go reportDone()
		check(newClient(driver).Start(ctx))
		for lines.Scan() {
		}
	case "enqueue":
		enqueue(ctx, newClient(driver), number(2), number(3))
	case "latency":
		client := newClient(driver)
		check(client.Start(ctx))
		latency(ctx, client, number(2), time.Duration(number(3))*time.Millisecond)
	default:
		panic("no such command: " + os.Args[1])
	}
}

func newClient(driver *riverpgxv5.Driver) *river.Client[pgx.Tx] {
	workers := river.NewWorkers()
	river.AddWorker(workers, &worker{})
	return must(river.NewClient(driver, &river.Config{
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2000}},
		Workers:           workers,
	}))
}

func bulk(ctx context.Context, client *river.Client[pgx.Tx], jobs, size int) {
	batch := make([]river.InsertManyParams, size)
	for i := range batch {
		batch[i].Args = noOp{}
	}
	for left := jobs; left > 0; left -= size {
		must(client.InsertManyFast(ctx, batch[:min(left, size)]))
	}
}

func enqueue(ctx context.Context, client *river.Client[pgx.Tx], jobs, tasks int) {
	each := func(jobs int) {
		var group sync.WaitGroup
		for range tasks {
			group.Go(func() {
				for range jobs {
					must(client.Insert(ctx, noOp{}, nil))
				}
			})
		}
		group.Wait()
	}
	each(5)
	ready()
	began := time.Now()
	each(jobs / tasks)
	fmt.Println("seconds", time.Since(began).Seconds())
}

func latency(ctx context.Context, client *river.Client[pgx.Tx], jobs int, every time.Duration) {
	for range 20 {
		must(client.Insert(ctx, noOp{}, nil))
		time.Sleep(every)
	}
	ready()
	ticks := time.NewTicker(every)
	for range jobs {
		must(client.Insert(ctx, noOp{Sent: int64(time.Since(start))}, nil))
		<-ticks.C
	}
	heard := func() []int64 {
		lock.Lock()
		defer lock.Unlock()
		return append([]int64(nil), waited...)
	}
	for patience := time.Now().Add(20 * time.Second); len(heard()) < jobs && time.Now().Before(patience); {
		time.Sleep(20 * time.Millisecond)
	}
	for _, nanos := range heard() {
		fmt.Println("waited_us", nanos/1000)
	}
	fmt.Println("end")
}

func reportDone() {
	for told := int64(0); ; time.Sleep(10 * time.Millisecond) {
		if now := done.Load(); now != told {
			fmt.Println("done", now)
			told = now
		}
	}
}

func ready() {
	fmt.Println("ready")
	lines.Scan()
}

func number(at int) int { return must(strconv.Atoi(os.Args[at])) }

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func must[T any](value T, err error) T {
	check(err)
	return value
}
